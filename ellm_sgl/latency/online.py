"""On-line fit of a latency model that is linear in a few components."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from ellm_sgl.latency.base import FloatArray

MEMORY_STEPS = 100
"""A step's weight falls to 1/e after so many further steps."""
PRIOR = 3.0
"""Weight, in steps, of the factors known so far against what new steps say of them. With little of
it, components that steps of a load share (rows, tokens read, what is fetched) trade places as the
noise of steps has it, and the decisions that weigh one against another flip with them. Simulated
with `fcfs` and steps twice as uneven as measured, eight starts: 952 tokens/s (758 at least) and the
learnt cost of fetching within a factor of 2.9; with a weight of 0.1 916 (654) and 5. A pull towards
the profile is steadier still, but a long steady load then unlearns what other steps had taught."""
SOLVE_EVERY = 8
"""Steps after which θ is solved for anew: a tenth of a millisecond, too much for every step."""
SPEED_RATE = 0.3
"""How fast the machine's present speed follows the last steps' common error."""
CLIP = 2.0
"""Errors count up to so many times their usual size: a step that was interrupted moves the
factors no further than a somewhat slow one does."""
LEAST = 0.01
"""Least factor. Above 0, so that each component has a time from which to grow again."""
SCALE_RATE = 0.05
"""How fast the usual size follows the errors. Lasting change widens it, so that it is learnt."""
SCALE_LIMITS = (0.01, 1.0)
"""Bounds of the usual size, as log of measured over predicted."""


class Correction:
    """Positive factors such that factors·components is a step's time.

    They are θ times the machine's present speed. θ: recursive least squares with forgetting on
    relative errors, Huber-clipped. Kept in information form (A = Σ w x xᵀ, c = Σ w x y): both are
    sums of decaying terms, so nothing blows up, however long it runs. What recent steps say
    nothing about stays as it is: forgotten weight is replaced by a pull towards the present θ.
    Speed: what the last few steps, whatever their work, were slower than θ says. On a shared or
    throttled processor that changes within seconds, faster than θ can be told apart.

    Args:
        size: number of components.
    """

    def __init__(self, size: int) -> None:
        self.factors: FloatArray = np.ones(size)
        self._theta = self.factors
        self._log_speed = 0.0
        self._prior = PRIOR * np.eye(size)
        self._a = self._prior.copy()
        self._c = self._a @ self._theta
        self._scale = 0.25
        self._unsolved: list[FloatArray] = []
        """x of the steps since θ was solved for: until then nothing else needs their sums."""

    def observe(self, components: FloatArray, seconds: float) -> None:
        """Learn from one step.

        Args:
            components: seconds of each component by the profile, float64 [size], none negative.
            seconds: measured; ignored unless positive and finite.
        """
        predicted = float(self._theta @ components)
        if not (0 < seconds < math.inf and 0 < predicted < math.inf):
            return
        error = math.log(seconds / predicted)
        bound = CLIP * self._scale
        clipped = min(max(error, -bound), bound)
        self._follow_scale(abs(error))
        self._log_speed += SPEED_RATE * (clipped - self._log_speed)
        self._unsolved.append(components / (predicted * math.exp(clipped)))
        if len(self._unsolved) == SOLVE_EVERY:
            self._add(np.array(self._unsolved))
            self._unsolved.clear()
            self._theta = self._solve()
        self.factors = math.exp(self._log_speed) * self._theta

    def _add(self, steps: FloatArray) -> None:
        """Add x of steps, [steps, size], to the sums: as if one by one, the last weighs most."""
        weights = (1 - 1 / MEMORY_STEPS) ** np.arange(len(steps))[::-1]
        kept = (1 - 1 / MEMORY_STEPS) ** len(steps)
        pull = (1 - kept) * self._prior
        self._a = kept * self._a + pull + steps.T * weights @ steps
        self._c = kept * self._c + pull @ self._theta + weights @ steps

    def _follow_scale(self, error: float) -> None:
        """Towards the median of the errors' sizes, by a fixed ratio per step."""
        step = math.exp(SCALE_RATE if error > self._scale else -SCALE_RATE)
        self._scale = min(max(self._scale * step, SCALE_LIMITS[0]), SCALE_LIMITS[1])

    def _solve(self) -> FloatArray:
        """Least squares under θ ≥ `LEAST`: A = R Rᵀ makes it |Rᵀ θ - R⁻¹ c|²."""
        root = np.linalg.cholesky(self._a)
        target = solve_triangular(root, self._c, lower=True, check_finite=False)
        beyond: FloatArray = nnls(root.T, target - LEAST * root.sum(axis=0), maxiter=100)[0]
        return LEAST + beyond
