"""The demo's load, and how its progress is shown; no server."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from ellm_sgl.serve.chat_load import ROLE_TOKENS, TOPICS, ChatLoad, ChatStream
from ellm_sgl.serve.cli import main
from ellm_sgl.serve.demo import ProcessorUse
from ellm_sgl.serve.live_view import Progress, draw, view

STATE: dict[str, Any] = {
    "running": 10,
    "waiting": 7,
    "cached_ratio_mean": 0.79,
    "uncached_tokens": 1800,
    "evicted_units_total": 100,
    "retractions_total": 0,
}


def progress(elapsed_s: float = 6.0, **more: Any) -> Progress:
    now = time.monotonic()
    streams = [ChatStream(topic) for topic in TOPICS]
    streams[0].text, streams[0].finish = "a finished answer", "length"
    streams[1].text = "line one\nline two, " + "and so on, " * 20 + "to the end"
    streams[1].arrivals_s = [now - 0.1 * i for i in range(1, 11)][::-1]
    return Progress(streams, elapsed_s, more.get("state", STATE), more.get("ratios", [1, 0.75, 0]))


def test_prompts_are_of_the_length_asked_for_and_differ() -> None:
    load = ChatLoad()
    prompts = [str(load.messages(stream.topic)) for stream in load.begin()]
    assert len(set(prompts)) == load.streams == 24
    for stream in load.begin():
        text = sum(len(str(m["content"])) for m in load.messages(stream.topic))
        assert 0.85 * load.prompt_tokens < text + ROLE_TOKENS <= load.prompt_tokens


def test_tokens_per_second_are_those_of_the_last_moments() -> None:
    assert progress().tokens_per_s() == pytest.approx(5.0)
    assert Progress([], 0.0, {}, []).tokens_per_s() == 0.0


@pytest.mark.parametrize("width", [80, 120])
def test_picture_fits_and_shows_figures_and_texts(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw("2/3 eLLM", progress()))
    text = console.export_text()
    assert all(len(line) == width for line in text.splitlines())
    for shown in ("complete 1/24", "0.79", "1,800", "100", "█▅▁", "str.replace", "to the end"):
        assert shown in text
    assert "a finished answer" not in text, "chats that still write come first"


def test_plain_lines_have_no_control_codes_and_do_not_flood() -> None:
    out = io.StringIO()
    with view(Console(file=out, force_terminal=False), "2/3 eLLM") as show:
        for elapsed_s in (0.0, 2.0, 5.1, 5.4, 10.2):
            show(progress(elapsed_s))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in out.getvalue()
    assert lines[0].startswith("2/3 eLLM: 5 s, 1/24 complete")
    assert lines[0].endswith("evicted units 100, retractions 0")


def test_stock_shows_no_state() -> None:
    out = io.StringIO()
    with view(Console(file=out, width=80), "1/3 stock") as show:
        show(progress(state={}))
    assert "1/3 stock" in out.getvalue() and "cached ratio" not in out.getvalue()


def test_only_a_terminal_gets_the_live_view() -> None:
    def shown(console: Console) -> str:
        with view(console, "2/3 eLLM") as show:
            show(progress())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert shown(Console(file=io.StringIO())).count("\n") == 1
    live = shown(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}))
    assert "\x1b" in live and "─ 2/3 eLLM ─" in live


@pytest.mark.parametrize("bad", ["--streams 0", "--streams 25", "--output-tokens 0",
                                 "--output-tokens 4097", "--pool-tokens 15"])  # fmt: skip
def test_options_out_of_range_are_refused(bad: str) -> None:
    done = CliRunner().invoke(main, ["demo", *bad.split()])
    assert done.exit_code == 2 and "is not in the range" in done.stderr


def test_a_server_and_its_children_are_not_other_programs() -> None:
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with (
        subprocess.Popen([sys.executable, "-c", command], start_new_session=True) as busy,
        subprocess.Popen(["sleep", "60"]) as idle,
    ):
        try:
            spin(busy.pid, 0.1)
            beside_idle, beside_busy = ProcessorUse(idle.pid), ProcessorUse(busy.pid)
            began = time.monotonic()
            spin(busy.pid, 1.0)
            seconds = time.monotonic() - began
            # That second is another program's, or not; whatever else runs is, both times.
            assert (beside_idle.others() - beside_busy.others()) * seconds > 0.5
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
            idle.kill()


def spin(parent: int, seconds: float) -> None:
    """Wait until this process's child has had so much more of the processor."""

    def had_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in psutil.Process(parent).children())

    until, deadline = had_s() + seconds, time.monotonic() + 60
    while had_s() < until:
        assert time.monotonic() < deadline, "the child does not spin"
        time.sleep(0.02)
