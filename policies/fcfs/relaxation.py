"""SLSQP on the continuous relaxation of the batch problem, as the eLLM paper solves its Eq. (1).

An alternative to looking at every batch size (`BatchProblem.solve`), which is the default because
it is exact and faster; docs/architecture.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import FloatArray
from ellm_sgl.policies.problem.batch_size import BatchProblem

NEIGHBOURS = 8
"""Whole batch sizes that are looked at on either side of the continuous optimum."""

ITERATIONS = 15
STEP = np.array([1e-5, 1e-6])
"""Of the differences that stand for derivatives, in b / most and in the share."""


class Relaxation:
    """Solves one batch problem after another, each from the optimum of the one before."""

    def __init__(self) -> None:
        self._share = 0.0
        self._admitted = 0.0

    def solve(self, problem: BatchProblem) -> int:
        """The best b near a local optimum of the relaxation.

        SLSQP is asked only where restoring could pay: where memory, not the SLO, keeps requests
        from being admitted with all cached.
        """
        cached = max(problem.fewest, int(np.searchsorted(problem.short, 0.0, side="right")) - 1)
        least = np.array([cached])
        _, seconds, fits = problem.least(least)
        if cached == problem.most or not fits[0]:
            return problem.best_of(np.arange(problem.fewest, cached + 1))
        optimum = round(self._optimum(problem, cached, float(seconds[0])))
        near = np.arange(optimum - NEIGHBOURS, optimum + NEIGHBOURS + 1)
        near = near[(near > cached) & (near <= problem.most)]
        return problem.best_of(np.concatenate((least, near)))

    def _optimum(self, problem: BatchProblem, cached: int, start_s: float) -> float:
        """Continuous b. Starts where the last one ended: as many more admitted, the same share."""
        step = _ContinuousStep(problem, cached, start_s)
        size = min(cached + self._admitted, problem.most)
        result = minimize(
            lambda x: step.at(x).cost,
            np.array([size / problem.most, self._share]),
            jac=lambda x: step.at(x).slope,
            bounds=[(cached / problem.most, 1.0), (0.0, 1.0)],
            constraints={
                "type": "ineq",
                "fun": lambda x: step.at(x).slack,
                "jac": lambda x: step.at(x).slack_slope,
            },
            method="SLSQP",
            options={"maxiter": ITERATIONS, "ftol": 1e-6},
        )
        size, self._share = float(result.x[0]) * problem.most, float(result.x[1])
        self._admitted = size - cached
        return size


@dataclass(frozen=True, eq=False)
class _Point:
    """The relaxation at x = (b / most, share), scaled to numbers about 1."""

    cost: float
    """T / b."""
    slope: FloatArray
    """Its derivatives, shape (2,)."""
    slack: FloatArray
    """Of memory, of what a step may restore and of the SLO, shape (3,); not negative if kept."""
    slack_slope: FloatArray
    """Shape (3, 2)."""


class _ContinuousStep:
    """Eq. (1) with every request beyond `cached` taken to be like their mean: SLSQP needs a smooth
    problem, and with the lengths as they are half its runs end in a kink between two requests."""

    def __init__(self, problem: BatchProblem, cached: int, start_s: float) -> None:
        self._problem = problem
        sums = (problem.tokens, problem.evictable, problem.squares, problem.prefix, problem.short)
        self._cached = cached
        self._sums = np.array([s[cached] for s in sums])
        self._means = np.array([s[-1] for s in sums]) - self._sums
        self._means /= problem.most - cached
        self._limit_s = float(problem.limit_s[cached])
        self._cost = start_s / cached
        self._seconds = start_s
        self._x: bytes = b""
        self._point: _Point | None = None

    def at(self, x: FloatArray) -> _Point:
        """SLSQP asks for cost, slack and both slopes in turn: they are computed once."""
        if self._point is None or x.tobytes() != self._x:
            self._x, self._point = x.tobytes(), self._evaluate(x)
        return self._point

    def _evaluate(self, x: FloatArray) -> _Point:
        problem, memory = self._problem, self._problem.memory
        step = np.where(x + STEP <= 1.0, STEP, -STEP)
        size = np.array([x[0], x[0] + step[0], x[0]]) * problem.most
        share = np.array([x[1], x[1], x[1] + step[1]])
        more = size - self._cached
        tokens, evictable, squares, prefix, short = (
            self._sums[:, None] + self._means[:, None] * more
        )
        evicted = share * evictable
        seconds = problem.latency.step_seconds(
            StepWork(
                decode_rows=size,
                decode_tokens=tokens,
                restored_tokens=evicted,
                restored_squares=share * share * squares,
                restored_prefix=share * prefix,
            )
        )
        cost = seconds / size / self._cost
        slack = np.stack(
            (
                ((1.0 - memory.staging_overhead) * evicted - short) / memory.device_tokens,
                1.0 - evicted / memory.max_restored_tokens,
                np.minimum((self._limit_s - seconds) / self._seconds, 1.0),
            )
        )
        return _Point(
            cost=float(cost[0]),
            slope=(cost[1:] - cost[0]) / step,
            slack=slack[:, 0],
            slack_slope=(slack[:, 1:] - slack[:, :1]) / step,
        )
