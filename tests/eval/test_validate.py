"""Errors and rankings of the validation; what runs needs real servers (docs/evaluation.md)."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.eval.validate.configurations import (
    AMPLE,
    BY_MODE,
    BY_POLICY,
    CELLS,
    CONFIGURATIONS,
    Configuration,
)
from ellm_sgl.eval.validate.measure import _Pace
from ellm_sgl.eval.validate.results import Comparison, Validation, overall
from ellm_sgl.latency import HardwareProfile

CPU = HardwareProfile("cpu", 1e11, 1e10, 1e10, 1e-5, 1e-3, 1e-4, 1e11)


def compared(
    configuration: Configuration, measured: float, predicted: float, ttft: float = 0.1
) -> Comparison:
    right = {"tokens_per_s": measured, "ttft": 0.1, "tpot": 0.01}
    said = {"tokens_per_s": predicted, "ttft": ttft, "tpot": 0.01}
    return Comparison(configuration, [right], said, given_steps=[right | {"ttft": 0.11}])


def validation(*comparisons: Comparison) -> Validation:
    return Validation("model", CPU, 0.1, 0.01, [1.0], comparisons)


def test_errors_are_relative_to_what_was_measured():
    found = validation(
        compared(CONFIGURATIONS[0], 100, 80), compared(CONFIGURATIONS[1], 100, 110, ttft=0.15)
    )
    mape = found.errors["mape"]
    assert mape["tokens_per_s"] == pytest.approx(0.15)
    assert mape["ttft"] == pytest.approx(0.25) and mape["tpot"] == 0.0
    own = found.errors["mape_given_steps"]
    assert own == pytest.approx({"tokens_per_s": 0.0, "ttft": 0.1, "tpot": 0.0})
    assert found.to_json()["mape_given_steps"] == own == overall([found])["mape_given_steps"]


def test_replays_are_averaged_and_compared_with_each_other():
    one, two, three = (
        {"tokens_per_s": t, "ttft": 0.1, "tpot": 0.01} for t in (100.0, 125.0, 100.0)
    )
    predicted = {"tokens_per_s": 90.0, "ttft": 0.1, "tpot": 0.01}
    repeated = Comparison(CONFIGURATIONS[0], [one, two], predicted, [one, predicted])
    assert repeated.measured["tokens_per_s"] == 112.5
    assert repeated.errors()["tokens_per_s"] == pytest.approx(0.2)
    assert repeated.errors_given_steps()["tokens_per_s"] == pytest.approx((0 + 35 / 125) / 2)
    same = Comparison(CONFIGURATIONS[1], [one, three], predicted, [predicted, predicted])
    found = validation(repeated, same)
    assert found.errors["repeated"]["tokens_per_s"] == pytest.approx((0.2 + 0.25) / 2 / 2)
    assert found.to_json()["configurations"][0]["measured"]["tokens_per_s"] == 112.5
    alone = validation(compared(CONFIGURATIONS[0], 100, 80))
    assert alone.errors["repeated"] is None and overall([alone])["repeated"] is None


def test_a_replay_is_held_against_the_mean_of_the_others():
    replays = [{"tokens_per_s": t, "ttft": 0.1, "tpot": 0.01} for t in (100.0, 100.0, 160.0)]
    found = Comparison(CONFIGURATIONS[0], replays, replays[0], replays).repeated()
    assert found["tokens_per_s"] == pytest.approx((30 / 130 + 30 / 130 + 60 / 100) / 3)
    assert found["ttft"] == 0.0


def test_modes_are_ranked_within_a_cell():
    ellm, recompute, swap, hcache = BY_MODE[:4]
    assert len({c.cell for c in (ellm, recompute, swap, hcache)}) == 1
    right = validation(compared(ellm, 100, 90), compared(recompute, 80, 70), compared(swap, 95, 99))
    (ranking,) = right.rankings()
    assert (ranking.pairs, ranking.apart, ranking.right) == (3, 2, 3) and ranking.correct
    wrong = validation(compared(ellm, 100, 90), compared(recompute, 80, 95))
    assert not wrong.rankings()[0].correct
    tied = validation(compared(ellm, 100, 90), compared(recompute, 80, 90))
    assert not tied.rankings()[0].correct


def test_what_is_as_good_as_measured_must_be_predicted_so():
    ellm, recompute = BY_MODE[:2]
    (near,) = validation(compared(ellm, 100, 95), compared(recompute, 98, 99)).rankings()
    assert (near.pairs, near.apart) == (1, 0) and near.correct
    (far,) = validation(compared(ellm, 100, 80), compared(recompute, 98, 99)).rankings()
    assert not far.correct


def test_policies_are_not_ranked_among_the_modes():
    assert not set(BY_POLICY) & set(BY_MODE)
    found = validation(compared(Configuration(AMPLE), 1, 1), compared(BY_POLICY[1], 9, 1))
    assert found.rankings() == []


def test_all_models_together():
    one = validation(compared(BY_MODE[0], 100, 90), compared(BY_MODE[1], 50, 60))
    two = validation(compared(BY_MODE[0], 100, 40), compared(BY_MODE[1], 50, 60))
    summed = overall([one, two])
    assert (summed["configurations"], summed["rankings"], summed["rankings_correct"]) == (4, 2, 1)
    assert summed["mape"]["tokens_per_s"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.2) / 4)


def test_unevenness_is_met_from_another_place_on():
    pace = _Pace(2.0, np.array([0.5, 1.0, 1.5, 1.0])).beginning_at(0.5)
    assert pace.slowdown == 2.0 and pace.step_noise.tolist() == [1.5, 1.0, 0.5, 1.0]


def test_loads_are_multiples_of_what_the_machine_serves():
    trace = CELLS[1].trace(capacity=1000.0, seed=0)
    arriving = trace.output_tokens.sum() / (trace.at_s[-1] - trace.at_s[0])
    assert arriving == pytest.approx(CELLS[1].load * 1000.0, rel=0.5)
    faster = CELLS[1].trace(capacity=2000.0, seed=0)
    assert faster.at_s[-1] == pytest.approx(trace.at_s[-1] / 2)
    assert faster.output_tokens.tolist() == trace.output_tokens.tolist()
