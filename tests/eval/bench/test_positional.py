"""`bench positional`: the line through its steps, the float64 that attention is held against, and a
server whose cache was filled."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.eval.bench.attention_error import attention_error, in_float64
from ellm_sgl.eval.bench.scenarios.positional import Line, Positional
from ellm_sgl.kernels import reference
from ellm_sgl.kernels.bench_step import Step, StepShape
from ellm_sgl.serve.cli import main


@given(st.floats(1e-4, 1.0), st.floats(1e-9, 1e-6))
def test_a_line_is_found_again(e: float, a: float) -> None:
    positions = [1024 << n for n in range(11)]
    found = Line.of(positions, [e + p * a for p in positions])
    assert found.e == pytest.approx(e, rel=1e-6) and found.a == pytest.approx(a, rel=1e-6)


def test_the_mean_up_to_a_position_is_that_of_its_steps() -> None:
    line = Line(5e-3, 2e-7)
    steps = [line.at(p) for p in range(1, 1001)]
    assert line.mean_up_to(1000) == pytest.approx(sum(steps) / len(steps))


def test_positions_double_up_to_the_longest() -> None:
    assert Positional(longest=5000).cells() == (1024, 2048, 4096, 5000)
    assert Positional().cells()[-1] == 1 << 20 and len(Positional().cells()) == 11


def test_float64_a_part_at_a_time_is_the_reference() -> None:
    """Parts: 4,096 units of 16 tokens."""
    step = Step(StepShape(1, 70_001, 0.0, 6, 2, 32), 1, torch.float32, torch.device("cpu"), 1)
    right = step.run(reference.mixed_attention, step.mixed, slice(0, 1))[0]
    torch.testing.assert_close(in_float64(step).float(), right, rtol=1e-6, atol=1e-9)


def test_attention_is_near_to_it() -> None:
    assert 0 < attention_error(70_001, 6, 2, 32) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--longest", "2000000000"], "--longest 2000000000: its KV takes"),
        (["--threads", "1000"], "--threads 1000:"),
        (["--longest", "5"], "--longest"),
    ],
)
def test_what_the_machine_has_not_is_refused(arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(main, ["bench", "positional", *arguments])
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert done.exit_code != 0 and len(errors) == 1 and problem in errors[0]


@pytest.mark.slow
def test_a_short_one() -> None:
    """The cache is hit: a prompt of 8,192 tokens has its first token at once."""
    arguments = ["--rounds", "1", "--longest", "8192", "--threads", "1", "--output-tokens", "20"]
    done = CliRunner().invoke(main, ["bench", "positional", *arguments, "--json"])
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert [s["cell"] for s in said["samples"]] == [1024, 2048, 4096, 8192]
    assert said["integrity"] == "ok" and said["attention_error"] < 1e-4
    assert all(s["figures"]["ttft_s"] < 1.0 for s in said["samples"])
    assert said["e_s"] > 0 and said["tables"][0]["rows"][-1][0] == "8,192"
