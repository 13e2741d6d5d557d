"""On-line correction: learns what is lasting, ignores what is not, and never goes astray."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ellm_sgl.latency import HardwareProfile, RooflineLatencyModel, StepWork
from tests.latency.machines import CPU, TINY, random_work, work_of

STEADY = work_of([300] * 8, [0] * 8)
OTHER_MACHINE = dataclasses.replace(
    CPU,
    flops=CPU.flops / 1.4,
    kv_bytes_per_s=2.7e9 / 1.6,
    step_overhead_s=CPU.step_overhead_s * 1.5,
    row_overhead_s=CPU.row_overhead_s * 0.7,
)


def machine(profile: HardwareProfile = OTHER_MACHINE) -> RooflineLatencyModel:
    """Stands for the machine: what steps really take."""
    return RooflineLatencyModel(TINY, profile)


def error(model: RooflineLatencyModel, truth: RooflineLatencyModel, steps: int = 200) -> float:
    """Mean relative error over random steps."""
    rng = np.random.default_rng(99)
    works = [random_work(rng) for _ in range(steps)]
    return float(np.mean([abs(model.step_seconds(w) / truth.step_seconds(w) - 1) for w in works]))


def train(
    model: RooflineLatencyModel, truth: RooflineLatencyModel, steps: int, noise: float = 0.03
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        work = random_work(rng)
        slow = 5.0 if rng.random() < 0.03 else 1.0  # interrupted by another process
        measured = float(truth.step_seconds(work)) * float(rng.lognormal(0, noise)) * slow
        model.observe(work, measured)


def test_200_steps_make_another_machine_known() -> None:
    model, truth = RooflineLatencyModel(TINY, CPU), machine()
    assert error(model, truth) > 0.2
    train(model, truth, 200)
    assert error(model, truth) < 0.05


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_components_do_not_trade_places_because_steps_are_uneven(seed: int) -> None:
    """A growing batch that decodes: rows and tokens pass together, and only noise tells one
    component's share from another's."""
    model, truth = machine(), machine()
    rng = np.random.default_rng(seed)
    for step in range(1_500):
        requests, tokens = 4 + step // 10 % 20, 100 + step % 200
        work = work_of([tokens] * requests, [0] * requests)
        model.observe(work, float(truth.step_seconds(work)) * float(rng.lognormal(0, 0.3)))
    assert max(model.factors.values()) < 1.5 * min(model.factors.values())


def test_a_hiccup_hardly_moves_it() -> None:
    model, truth = machine(), machine()
    train(model, truth, 300)
    before = float(model.step_seconds(STEADY))
    model.observe(STEADY, before + 1.0)
    assert float(model.step_seconds(STEADY)) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("factor", [0.33, 3.0])
def test_a_lasting_change_is_learnt(factor: float) -> None:
    model, truth = machine(), machine()
    train(model, truth, 300)
    now = float(truth.step_seconds(STEADY)) * factor
    for _ in range(100):
        model.observe(STEADY, now)
    assert float(model.step_seconds(STEADY)) == pytest.approx(now, rel=0.05)


def test_a_long_steady_load_does_not_unlearn_the_rest() -> None:
    model, truth = RooflineLatencyModel(TINY, CPU), machine()
    train(model, truth, 500, noise=0.0)
    rng = np.random.default_rng(1)
    for _ in range(5_000):
        model.observe(STEADY, float(truth.step_seconds(STEADY)) * float(rng.lognormal(0, 0.03)))
    assert error(model, truth) < 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_make_no_sense_are_ignored(seconds: float) -> None:
    model = machine()
    before = model.factors
    model.observe(STEADY, seconds)
    assert model.factors == before


def test_an_empty_step_is_bearable() -> None:
    model = machine()
    model.observe(StepWork(0, 0), 0.01)
    assert math.isfinite(float(model.step_seconds(STEADY)))


def test_whatever_comes_factors_stay_finite_and_positive() -> None:
    model = machine()
    rng = np.random.default_rng(2)
    for i in range(20_000):
        work = random_work(rng) if i % 1000 < 500 else STEADY
        model.observe(work, float(10 ** rng.uniform(-6, 3)))
    assert all(math.isfinite(f) and f > 0 for f in model.factors.values())


def test_it_recovers_from_a_time_of_chaos() -> None:
    model, truth = machine(), machine()
    rng = np.random.default_rng(2)
    for _ in range(2_000):
        work = random_work(rng)
        model.observe(work, float(truth.step_seconds(work)) * float(rng.lognormal(0, 1.5)))
    train(model, truth, 600)
    assert error(model, truth) < 0.06
