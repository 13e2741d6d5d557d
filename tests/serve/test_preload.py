"""Servers as copies of one process: what they are given, how they end, and when there are none."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ellm_sgl.client import preload
from ellm_sgl.client.preload import Preloaded, copy, enables_ellm, preloaded
from ellm_sgl.config import ENV
from ellm_sgl.sglang import processes

pytestmark = pytest.mark.slow

ENVIRONMENT = dict(os.environ)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Preloaded]:
    monkeypatch.setattr(preload, "MODULE", "tests.serve.preloaded_stand_in")
    found = Preloaded(ENVIRONMENT)
    yield found
    found.close()


def test_a_copy_has_its_own_arguments_environment_and_log(
    parent: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "first", tmp_path / "second"
    first = parent.start(["0", "3"], ENVIRONMENT | {"ELLM_SGL_X": "x"}, logs[0])
    monkeypatch.chdir(tmp_path)
    second = parent.start(["0", "0"], ENVIRONMENT, logs[1])
    assert (first.wait(), second.wait()) == (3, 0)
    assert first.poll() == 3
    assert logs[0].read_text() == f"['0', '3'] x {Path(__file__).parents[2]} ['0', '3'] stock\n"
    assert logs[1].read_text() == f"['0', '0'] None {tmp_path} ['0', '0'] stock\n"


def test_servers_with_ellm_are_copies_of_a_process_with_its_hooks(
    parent: Preloaded, tmp_path: Path
) -> None:
    enabled = parent.start(["0", "3", "--ellm-policy", "fcfs"], ENVIRONMENT, tmp_path / "ours")
    stock = parent.start(["0", "4"], ENVIRONMENT, tmp_path / "stock")
    assert (enabled.wait(), stock.wait()) == (3, 4)
    assert (tmp_path / "ours").read_text().endswith(" eLLM\n")
    assert (tmp_path / "stock").read_text().endswith(" stock\n")


@pytest.mark.parametrize(
    ("arguments", "enables"),
    [
        ("--ellm-policy fcfs", True),
        ("--ellm-mode swap", True),
        ("--ellm-policy off --ellm-mode swap", False),
        ("--ellm-policy fcfs --ellm-policy=off", False),
        ("--ellm-pol fcfs", False),  # it cannot be told: a copy of the other serves too
        ("--max-total-tokens 900", False),
    ],
)
def test_which_servers_have_ellm_enabled(arguments: str, enables: bool) -> None:
    assert enables_ellm(arguments.split()) == enables


def test_a_stock_server_is_no_copy_of_a_process_with_ellms_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_prepared_for", True)
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(RuntimeError, match="eLLM's hooks"):
        processes.may_be_copied()


def test_it_can_be_waited_for_and_told_to_end(parent: Preloaded, tmp_path: Path) -> None:
    process = parent.start(["60", "0"], ENVIRONMENT, tmp_path / "log")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    assert os.getsid(process.pid) == process.pid
    title = " ".join(psutil.Process(process.pid).cmdline()).strip()
    assert title.endswith("-m ellm_sgl.serve.launch 60 0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # nobody is hit


def test_copies_end_with_the_process_that_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preload, "MODULE", "tests.serve.preloaded_stand_in")
    parent = Preloaded(ENVIRONMENT)
    process = psutil.Process(parent.start(["60", "0"], ENVIRONMENT, tmp_path / "log").pid)
    parent.close()
    process.wait(timeout=10)


def test_what_may_not_be_a_copy_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(preload, "MODULE", "tests.serve.preloaded_stand_in")
    monkeypatch.setattr(preload, "_current", None)  # that of all tests is not to be hit
    with preloaded(ENVIRONMENT):
        assert copy(["0", "0"], ENVIRONMENT | {"OMP_NUM_THREADS": "7"}, log) is None
        late = ENVIRONMENT | {"ELLM_SGL_SETTINGS": "{}"}
        found = copy(["60", "0"], late, log)
        assert found is not None
        os.kill(psutil.Process(found.pid).ppid(), signal.SIGKILL)
        assert found.poll() is None, "it outlives the process that it is a copy of"
        os.killpg(found.pid, signal.SIGKILL)
        assert found.wait(timeout=10) == -signal.SIGKILL
        assert copy(["0", "0"], late, log) is None, "the process is gone"
    monkeypatch.setattr(preload, "MODULE", "tests.serve.no_such_module")
    with preloaded(ENVIRONMENT):
        assert copy(["0", "0"], ENVIRONMENT, log) is None


def test_an_inner_context_has_the_same_process_where_its_environment_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preload, "MODULE", "tests.serve.preloaded_stand_in")
    monkeypatch.setattr(preload, "_current", None)

    def parent_of(environment: dict[str, str]) -> int:
        found = copy(["60", "0"], environment, tmp_path / "log")
        assert found is not None
        parent = psutil.Process(found.pid).ppid()
        found.send_signal(signal.SIGTERM)
        assert found.wait(timeout=10) == -signal.SIGTERM
        return parent

    other = ENVIRONMENT | {"OMP_NUM_THREADS": "7"}
    with preloaded(ENVIRONMENT):
        outer = parent_of(ENVIRONMENT)
        with preloaded(ENVIRONMENT | {"ELLM_SGL_X": "x"}):
            assert parent_of(ENVIRONMENT) == outer
        assert parent_of(ENVIRONMENT) == outer, "it is still there"
        with preloaded(other):
            assert parent_of(other) != outer
        assert parent_of(ENVIRONMENT) == outer


def test_a_copy_that_cannot_begin_has_ended(parent: Preloaded, tmp_path: Path) -> None:
    process = parent.start(["60", "0"], ENVIRONMENT, tmp_path / "no such folder" / "log")
    assert process.wait(timeout=10) == 1
