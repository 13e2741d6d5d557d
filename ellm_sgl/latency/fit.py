"""Fits a hardware profile to measured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from ellm_sgl.latency.base import FloatArray, StepWork
from ellm_sgl.latency.profile import HardwareProfile, ModelShape
from ellm_sgl.latency.roofline import RooflineLatencyModel

_FITTED = {
    "flops": (1e6, 1e17),
    "attention_flops": (1e6, 1e17),
    "device_bytes_per_s": (1e6, 1e15),
    "kv_bytes_per_s": (1e6, 1e15),
    "step_overhead_s": (1e-6, 10.0),
    "row_overhead_s": (1e-8, 1.0),
    "phase_change_s": (1e-9, 1.0),
    "restore_overhead_s": (1e-9, 1.0),
}
"""Fields fitted by their logarithm, each with its bounds."""
_SHARES = {"packing": (0.0, 3.0), "overlap": (0.0, 1.0), "fetch_share": (0.0, 20.0)}
"""Fields fitted as they are."""
_TRUST = 0.03
"""Weight of staying near the first guess, against a relative error of a step. Small: it decides
only what the steps leave open, such as how a fixed time divides into overhead and reading."""


def fit_profile(
    shape: ModelShape, guess: HardwareProfile, steps: Sequence[tuple[StepWork, float]]
) -> HardwareProfile:
    """The profile whose roofline fits `steps` best, by relative error; a few slow ones are borne.

    Args:
        shape: the model that ran.
        guess: where to start; fields that no step depends on keep its values.
        steps: (work, seconds) of each.

    Returns:
        `guess` with all fitted fields replaced.

    Raises:
        ValueError: a step's time is not positive.
    """
    seconds = np.array([s for _, s in steps])
    if not np.all(seconds > 0):
        raise ValueError("every step must take a positive time")
    work = _stack([w for w, _ in steps])
    bounds = [*(np.log(b) for b in _FITTED.values()), *_SHARES.values()]
    low, high = np.array(bounds, np.float64).T
    start = np.clip(_to_vector(guess), low, high)

    def residuals(vector: FloatArray) -> FloatArray:
        predicted = RooflineLatencyModel(shape, _to_profile(guess, vector)).step_seconds(work)
        return np.concatenate([predicted / seconds - 1, _TRUST * (vector - start)])

    # Strictly inside the bounds, as `least_squares` wants its start.
    inside = np.clip(start, low + 1e-9, high - 1e-9)
    found = least_squares(residuals, inside, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return _to_profile(guess, found.x)


def _stack(steps: Sequence[StepWork]) -> StepWork:
    """One `StepWork` of arrays."""
    names = [field.name for field in dataclasses.fields(StepWork)]
    return StepWork(**{n: np.array([getattr(s, n) for s in steps], np.float64) for n in names})


def _to_vector(profile: HardwareProfile) -> FloatArray:
    values = dataclasses.asdict(profile)
    values["kv_bytes_per_s"] = profile.kv_bytes_per_s or profile.device_bytes_per_s
    logs = [np.log(max(values[name], low)) for name, (low, _) in _FITTED.items()]
    return np.array([*logs, *(values[name] for name in _SHARES)])


def _to_profile(guess: HardwareProfile, vector: FloatArray) -> HardwareProfile:
    logs = np.exp(vector[: len(_FITTED)]).tolist()
    shares = vector[len(_FITTED) :].tolist()
    return dataclasses.replace(
        guess,
        **dict(zip(_FITTED, logs, strict=True)),
        **dict(zip(_SHARES, shares, strict=True)),
    )
