"""The library's threads, its copying, and what happens where it is not built."""

from __future__ import annotations

import os
import runpy
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.kernels import reference, torch_paged
from ellm_sgl.kernels.choose import choose
from ellm_sgl.kernels.cpu import library
from ellm_sgl.kernels.cpu.attention import copy_units, mixed_attention
from ellm_sgl.kernels.cpu.build import FOLDER, LIBRARY, BuildError, build, source_hash
from tests.kernels.cpu_steps import BF16, F16, F32, Sizes, make
from tests.kernels.threads import others, wait_until_asleep

built = pytest.mark.skipif(library.load().library is None, reason=library.load().problem or "built")
STEP = Sizes(((3000, 1), (300, 64), (900, 1)), 16, 2, 2, 64, F32, F32, 0.0)


@built
@pytest.mark.usefixtures("four_threads")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    inputs = make(STEP)
    expected, keys, values = inputs.run(mixed_attention)
    # In the child only our own kernel: PyTorch's thread pool does not survive a fork.
    child = os.fork()
    if child == 0:
        out = mixed_attention(
            inputs.q, inputs.k, inputs.v, keys, values, inputs.layout, inputs.scale
        )
        os._exit(0 if np.array_equal(out.numpy(), expected.numpy()) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(inputs.run(mixed_attention)[0], expected)


@built
@pytest.mark.usefixtures("four_threads")
def test_several_python_threads_may_call_at_once() -> None:
    inputs = make(STEP)
    expected, _, _ = inputs.run(mixed_attention)
    same: list[bool] = []

    def call() -> None:
        for _ in range(10):
            same.append(torch.equal(inputs.run(mixed_attention)[0], expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert same == [True] * 40


@built
@pytest.mark.usefixtures("four_threads")
def test_workers_sleep_between_calls() -> None:
    inputs = make(STEP)
    before = others()
    for _ in range(3):
        inputs.run(mixed_attention)
    assert others() - before or len(others()) >= 3
    wait_until_asleep()


@built
@given(data=st.data())
def test_copy_units(data: st.DataObject) -> None:
    units = st.integers(0, 9)
    to = data.draw(st.lists(units, unique=True))
    origin = data.draw(st.lists(units, min_size=len(to), max_size=len(to)))
    source = torch.randn(10, 2, 3)
    target = torch.randn(10, 2, 3)
    expected = target.clone()
    expected[to] = source[origin]
    copy_units(target, torch.tensor(to, dtype=torch.int64), source, torch.tensor(origin), threads=2)
    assert torch.equal(target, expected)


@built
def test_copy_units_refuses_what_does_not_fit() -> None:
    pool = torch.zeros(4, 8)
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="outside"):
        copy_units(pool, torch.tensor([4]), pool, one)
    with pytest.raises(ValueError, match="outside"):
        copy_units(pool, one, pool, torch.tensor([-1]))
    with pytest.raises(ValueError, match="units differ"):
        copy_units(pool, one, torch.zeros(4, 9), one)
    with pytest.raises(ValueError, match="contiguous"):
        copy_units(pool[:, :4], one, pool[:, :4], one)
    with pytest.raises(ValueError, match="2 units to 1"):
        copy_units(pool, one, pool, torch.tensor([1, 2]))


@pytest.fixture
def fresh_load():
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@built
@pytest.mark.usefixtures("fresh_load")
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_hash", lambda: "of a later version")
    assert "other sources" in library.load().problem
    with pytest.raises(RuntimeError, match="other sources"):
        library.loaded()


def test_sources_have_one_hash_whatever_path_they_are_reached_by(tmp_path: Path) -> None:
    """setup.py runs the file by the package's path, which in a checkout is a link."""
    for name in ("a-link", "z-link"):
        (tmp_path / name).symlink_to(FOLDER)
        reached = runpy.run_path(str(tmp_path / name / "build.py"))
        assert reached["source_hash"]() == source_hash()


@pytest.mark.usefixtures("fresh_load")
def test_without_the_library_pytorch_attends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    kernel, chosen, _ = choose(torch.device("cpu"), 64, F32, F32)
    assert kernel is torch_paged.mixed_attention
    assert "not built" in chosen


@built
def test_the_library_attends_where_it_can() -> None:
    kernel, chosen, _ = choose(torch.device("cpu"), 64, F32, F32)
    assert kernel is mixed_attention
    assert chosen.startswith("C++ kernels (")
    assert choose(torch.device("cpu"), 30, F32, F32)[0] is torch_paged.mixed_attention


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_load")
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_builds_without_warnings_and_attends(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    monkeypatch.setenv("CXX", compiler)
    build(tmp_path / LIBRARY, ("-Werror", "-O1"))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert library.load().problem == ""
    for dtype in (F32, BF16, F16):
        inputs = make(replace(STEP, row_type=dtype, pool_type=dtype))
        expected, _, _ = inputs.run(reference.mixed_attention)
        out, _, _ = inputs.run(mixed_attention)
        tolerance = inputs.tolerance(3001)
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


def test_a_build_without_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tmp_path / "library.so")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(BuildError, match="missing"):
        build(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()
