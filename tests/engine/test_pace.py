"""How much longer steps take than predicted, as policies are told."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.engine.pace import FEWEST_WINDOWS, QUANTILE, WINDOW_STEPS, WINDOWS, Pace
from ellm_sgl.latency import StepWork

DECODE, PROMPT = StepWork(8, 800), StepWork(0, 0, prefill_rows=100)
MIXED = StepWork(8, 800, prefill_rows=100)


def after(ratios: list[float], steps: int = 1) -> float:
    pace = Pace()
    for ratio in ratios:
        pace.note(DECODE, steps * ratio * 0.01, 0.01, steps)
    return pace.ratio


def test_it_is_one_before_enough_was_seen() -> None:
    assert after([2.0] * (FEWEST_WINDOWS * WINDOW_STEPS - 1)) == 1.0
    assert after([2.0] * FEWEST_WINDOWS * WINDOW_STEPS) == pytest.approx(2.0)


@pytest.mark.parametrize("work", [PROMPT, MIXED])
def test_prompts_do_not_count(work: StepWork) -> None:
    pace = Pace()
    for _ in range(FEWEST_WINDOWS * WINDOW_STEPS):
        pace.note(DECODE, 0.011, 0.01)
        pace.note(work, 5.0, 0.01)
    assert pace.ratio == pytest.approx(1.1)


def test_several_equal_steps_count_as_many() -> None:
    ratios = [1.2] * (FEWEST_WINDOWS * WINDOW_STEPS // 8)
    assert after(ratios, steps=8) == pytest.approx(1.2)


def test_one_slow_step_is_no_slow_spell() -> None:
    ratios = [1.0] * (WINDOWS * WINDOW_STEPS)
    ratios[100] = 20.0
    assert after(ratios) == pytest.approx(1.0)


def test_a_machine_that_stood_still_is_no_slow_machine() -> None:
    """In the first steps of a server, of which there are few windows."""
    ratios = [1.0] * (FEWEST_WINDOWS * WINDOW_STEPS)
    ratios[20] = 6000.0
    assert after(ratios) < 1.2


def test_slow_spells_count_once_they_are_common_enough() -> None:
    share = 1.0 - QUANTILE
    for common, slow in ((share + 0.15, True), (share - 0.15, False)):
        spells = np.arange(WINDOWS) < common * WINDOWS
        assert (after(np.repeat(1.0 + spells, WINDOW_STEPS).tolist()) > 1.5) is slow


def test_what_is_long_past_is_forgotten() -> None:
    ratios = [3.0] * (WINDOWS * WINDOW_STEPS) + [1.0] * (WINDOWS * WINDOW_STEPS)
    assert after(ratios) == pytest.approx(1.0)
