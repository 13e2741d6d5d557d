"""Fitting a profile to measured steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel, StepWork
from ellm_sgl.latency.fit import fit_profile
from tests.latency.machines import CPU, GPU, LLAMA, MOE, TINY, random_work


def wrong(profile: HardwareProfile) -> HardwareProfile:
    """A first guess that is off by a factor of two or more everywhere."""
    return dataclasses.replace(
        profile,
        flops=2 * profile.flops,
        device_bytes_per_s=3 * profile.device_bytes_per_s,
        attention_flops=profile.flops,
        kv_bytes_per_s=None,
        step_overhead_s=1e-3,
        row_overhead_s=1e-5,
    )


@pytest.mark.parametrize(("shape", "machine"), [(TINY, CPU), (LLAMA, GPU), (MOE, GPU)])
def test_noisy_steps_are_enough_to_predict_others(
    shape: ModelShape, machine: HardwareProfile
) -> None:
    rng = np.random.default_rng(3)
    truth = RooflineLatencyModel(shape, machine)
    steps = []
    for i in range(30):
        work = random_work(rng)
        slow = 4.0 if i == 7 else 1.0
        steps.append((work, float(truth.step_seconds(work)) * float(rng.lognormal(0, 0.03)) * slow))
    model = RooflineLatencyModel(shape, fit_profile(shape, wrong(machine), steps))
    works = [random_work(rng) for _ in range(200)]
    errors = [abs(model.step_seconds(w) / truth.step_seconds(w) - 1) for w in works]
    assert np.mean(errors) < 0.05


def test_a_fixed_time_of_steps_that_restore_is_found() -> None:
    """From the guess that calibration begins with."""
    truth = dataclasses.replace(CPU, restore_overhead_s=3e-3)
    model, rng = RooflineLatencyModel(TINY, truth), np.random.default_rng(5)
    steps = [
        (work, float(model.step_seconds(work))) for work in (random_work(rng) for _ in range(40))
    ]
    guess = dataclasses.replace(truth, restore_overhead_s=1e-3)
    found = fit_profile(TINY, guess, steps)
    assert found.restore_overhead_s == pytest.approx(3e-3, rel=0.3)


def test_what_no_step_depends_on_keeps_the_guess() -> None:
    profile = fit_profile(TINY, CPU, [(StepWork(1, 64), 0.006)])
    assert profile.link_bytes_per_s == CPU.link_bytes_per_s
    assert profile.attention_flops == pytest.approx(CPU.attention_flops)
    assert profile.name == CPU.name
    assert float(RooflineLatencyModel(TINY, profile).step_seconds(StepWork(1, 64))) == (
        pytest.approx(0.006, rel=0.02)
    )


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        fit_profile(TINY, CPU, [(StepWork(1, 64), 0.0)])
