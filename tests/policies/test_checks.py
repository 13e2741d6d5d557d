"""Every answer that cannot be applied is refused, with its kind, its value and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ellm_sgl.policies import Batch, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.checks import InvalidAnswer, check_batch, check_ratios, check_split
from ellm_sgl.policies.testing import make_state, requests


@pytest.fixture
def state() -> SystemState:
    """Three requests run, four wait."""
    return make_state(requests([100, 200, 300]), requests([10, 20, 30, 40]), device_tokens=4096)


@pytest.mark.parametrize(
    "batch",
    [
        Batch(admit=()),
        Batch(admit=(3, 0, 1, 2)),
        Batch(admit=(2,), pause=(0, 2)),
        Batch(admit=(np.int64(3),)),  # type: ignore[arg-type]
    ],
)
def test_a_batch_that_can_be_applied(state: SystemState, batch: Batch) -> None:
    check_batch(state, batch)


@pytest.mark.parametrize(
    ("batch", "kind", "told"),
    [
        (None, "type", r"batch\(\) is None .* return a Batch"),
        ((0, 1), "type", r"batch\(\) is \(0, 1\) \(tuple\)"),
        (Batch(admit=[0, 1]), "type", r"admit is \[0, 1\] \(list\); return a tuple"),  # type: ignore[arg-type]
        (Batch(admit=np.arange(2)), "type", "an array of int64"),  # type: ignore[arg-type]
        (Batch(admit=(0, 1.0)), "type", r"admit is 1\.0 \(float\)"),  # type: ignore[arg-type]
        (Batch(admit=(True,)), "type", r"True \(bool\)"),
        (Batch(admit=("a" * 500,)), "type", "a{79}… "),  # type: ignore[arg-type]
        (Batch(admit=(-1,)), "range", "admit has -1; .* state.waiting, which has 4 entries"),
        (Batch(admit=(0, 4)), "range", "admit has 4"),
        (Batch(admit=(), pause=(3,)), "range", "pause has 3; .* state.running, which has 3"),
        (Batch(admit=(0, 2, 1, 2, 0)), "duplicate", "admit has 2 more than once"),
        (Batch(admit=(), pause=(1, 1)), "duplicate", "pause has 1 more than once"),
        (Batch(admit=(0,), pause=(0, 1, 2)), "stall", "all 3 running requests; let at least one"),
    ],
)
def test_a_batch_that_cannot(state: SystemState, batch: Any, kind: str, told: str) -> None:
    with pytest.raises(InvalidAnswer, match=told) as raised:
        check_batch(state, batch)
    assert raised.value.kind == kind


def test_nobody_runs_nobody_pauses() -> None:
    check_batch(make_state(requests([]), device_tokens=64), Batch(admit=()))


def test_somebody_must_be_admitted_where_nobody_runs() -> None:
    state = make_state(requests([]), requests([10]), device_tokens=64)
    check_batch(state, Batch(admit=(0,)))
    with pytest.raises(InvalidAnswer, match="admit is empty while nothing runs") as raised:
        check_batch(state, Batch(admit=()))
    assert raised.value.kind == "stall"


def ratios(*running: float, admitted: Any = ()) -> Ratios:
    return Ratios(np.array(running, np.float64), np.array(admitted, np.float64))


@pytest.mark.parametrize("answer", [ratios(0.0, 0.5, 0.999, admitted=(0.0, 0.1))])
def test_ratios_that_can_be_applied(state: SystemState, answer: Ratios) -> None:
    check_ratios(state, Batch(admit=(3, 1)), answer)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (0.5, "type", r"ratio\(\) is 0\.5 \(float\); return a Ratios"),
        (Ratios([0.0] * 3, np.zeros(2)), "type", r"running is \[0\.0, .* return a float array"),  # type: ignore[arg-type]
        (Ratios(np.zeros(3, int), np.zeros(2)), "type", "running is an array of int64"),
        (ratios(0, 0, admitted=(0, 0)), "shape", r"running has shape \(2,\); give \(3,\)"),
        (ratios(0, 0, 0, admitted=(0,)), "shape", r"admitted has shape \(1,\); give \(2,\)"),
        (Ratios(np.zeros((3, 1)), np.zeros(2)), "shape", r"\(3, 1\)"),
        (ratios(0, np.nan, 2, admitted=(0, 0)), "nan", r"running\[1\] is nan"),
        (ratios(0, 0, 0, admitted=(0, np.nan)), "nan", r"admitted\[1\] is nan"),
        (
            ratios(0, 0, 2, admitted=(0, 0)),
            "range",
            r"running\[2\] is 2; .* at least 0 and below 1",
        ),
        (ratios(1, 0, 0, admitted=(0, 0)), "range", r"running\[0\] is 1;"),
        (ratios(0, 0, 0, admitted=(-0.1, 0)), "range", r"admitted\[0\] is -0\.1"),
        (ratios(0, np.inf, 0, admitted=(0, 0)), "range", r"running\[1\] is inf"),
    ],
)
def test_ratios_that_cannot(state: SystemState, answer: Any, kind: str, told: str) -> None:
    with pytest.raises(InvalidAnswer, match=told) as raised:
        check_ratios(state, Batch(admit=(3, 1)), answer)
    assert raised.value.kind == kind


@pytest.mark.parametrize(
    "answer", [WorkSplit(0, 1, 32), WorkSplit(3, 2, 992), WorkSplit(1, 0, 512)]
)
def test_threads_that_can_be_applied(answer: WorkSplit) -> None:
    check_split(answer)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        ((1, 1, 512), "type", "return a WorkSplit"),
        (WorkSplit(1.0, 1, 512), "type", r"swap_layers is 1\.0 \(float\); return an integer"),  # type: ignore[arg-type]
        (WorkSplit(1, 1, None), "type", "delta is None"),  # type: ignore[arg-type]
        (WorkSplit(4, 1, 512), "range", "swap_layers is 4; give l1 from 0 to 3"),
        (WorkSplit(-1, 1, 512), "range", "swap_layers is -1"),
        (WorkSplit(1, 3, 512), "range", "recompute_layers is 3; give l2 from 0 to 2"),
        (WorkSplit(0, 0, 512), "range", "at least one of them"),
        (WorkSplit(1, 1, 0), "range", "delta is 0; give a multiple of 32 from 32 to 992"),
        (WorkSplit(1, 1, 1024), "range", "delta is 1024"),
        (WorkSplit(1, 1, 33), "range", "delta is 33"),
    ],
)
def test_threads_that_cannot(answer: Any, kind: str, told: str) -> None:
    with pytest.raises(InvalidAnswer, match=told) as raised:
        check_split(answer)
    assert raised.value.kind == kind
