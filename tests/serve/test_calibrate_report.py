"""The comparison behind `ellm-sgl calibrate`, on steps whose times are known."""

from __future__ import annotations

import dataclasses

import pytest

from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.serve.calibrate import LEARNING_STEPS, LOADS, compare, step_noise
from tests.latency.machines import CPU, TINY


def test_each_model_is_judged_on_its_own_steps() -> None:
    model = RooflineLatencyModel(TINY, CPU)
    steps = []
    for i in range(LEARNING_STEPS + 50):
        work = StepWork(1 + i % 8, 100 * (1 + i % 8))
        by_profile = float(model.step_seconds(work))
        times = {"seconds": 1.25 * by_profile, "predicted_s": by_profile, "paper_s": 0.0}
        if i >= 10 + LEARNING_STEPS:
            times["predicted_s"] = times["seconds"] * 1.1
        steps.append(dataclasses.asdict(work) | times)
    profile, on_line, paper = compare(TINY, CPU, steps, start_up=10)
    assert [e.steps for e in (profile, on_line, paper)] == [240, 40, 240]
    assert profile.mape == pytest.approx(0.2) and profile.median_ape == pytest.approx(0.2)
    assert on_line.mape == pytest.approx(0.1)
    assert paper.mape == pytest.approx(1.0)
    few = compare(TINY, CPU, steps[: LEARNING_STEPS + 10], start_up=10)
    assert [e.model for e in few] == [profile.model, paper.model]


def test_unevenness_is_that_of_equal_steps_in_a_row() -> None:
    def step(rows: float, seconds: float) -> dict[str, float]:
        work = dataclasses.asdict(StepWork(rows, 100 * rows))
        return work | {"seconds": seconds, "predicted_s": 2.0 * seconds}

    even = [step(3, 0.010) for _ in range(9)]
    uneven = [step(5, 0.020 if i == 4 else 0.010) for i in range(9)]
    on_line, beside = step_noise([*even, step(1, 9.0), *uneven], first=0)
    assert on_line.steps == beside.steps == 18  # all but the one of another kind
    assert on_line.mape == pytest.approx(1.0)
    assert beside.mape == pytest.approx(0.5 / 18) and beside.median_ape == 0.0
    later_on_line, later = step_noise([*even, *uneven], first=12)
    assert later_on_line.steps == later.steps == 6
    assert step_noise([step(i, 0.01) for i in range(20)], first=0) == ()


def test_loads_differ_in_everything() -> None:
    assert len({x.work.decode_rows for x in LOADS}) > 3
    assert {x.ratio for x in LOADS} == {0.0, 0.25, 0.5}
    assert len({x.tokens for x in LOADS}) == 3
