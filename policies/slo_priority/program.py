"""Whose KV to evict: a convex program over the evicted tokens of all requests.

    minimise    Σ w_i (c_i n_i + q n_i²)
    subject to  Σ n_i ≥ need,  0 ≤ n_i ≤ u_i

n_i is the number of request i's tokens to be recomputed in each step, c_i and q the time that
they take (linear layers and prefix; attention among them), w_i the request's urgency, u_i
what can be evicted of it, and `need` what memory lacks. Since every cost is positive, Σ n_i = need
at the optimum, so the bound Σ n_i ≤ `max_restored_tokens` is one on `need`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import FloatArray, IntArray, SystemState
from ellm_sgl.policies.problem.candidates import Candidates

SIZES = (32, 128, 320)
"""Sizes for which the program is compiled ahead; larger ones double, and are compiled on use."""
LEAST_CURVATURE = 1e-4
"""q u is at least this share of c, for the largest u. Attention among them may cost nothing
that a model would notice; a little of it keeps the optimum unique."""
NEARLY_ALL = 0.999
"""Of what can be evicted: if so much is needed, all is. (Interior-point solvers want an
interior.)"""
FREE = 1e-3
"""Restoring all that is needed costs at least this share of a step, whatever the model says: a
model may find recomputation free, but never worth doing."""


@dataclass(frozen=True, eq=False)
class EvictionCosts:
    """The program's data, one entry per request. All positive, except that u_i may be 0."""

    weight: FloatArray
    """w_i."""
    linear: FloatArray
    """c_i, seconds per token."""
    quadratic: float
    """q, seconds per token²."""
    limit: IntArray
    """u_i, tokens, in whole blocks."""

    def __getitem__(self, positions: IntArray) -> EvictionCosts:
        """Of some of the requests."""
        weight, linear = self.weight[positions], self.linear[positions]
        return EvictionCosts(weight, linear, self.quadratic, self.limit[positions])

    @classmethod
    def of(
        cls, state: SystemState, candidates: Candidates, weight: FloatArray, need: float
    ) -> EvictionCosts:
        """Costs by the latency model, for evicting about `need` tokens of these requests: the
        mean time per token, and per pair of tokens, that this adds to the step."""
        limit = candidates.evictable.astype(np.float64)
        total = max(float(limit.sum()), 1.0)
        squares = need * float(limit @ limit) / total
        prefix = need * float(limit @ candidates.shared) / total
        steps = state.latency.step_seconds(
            StepWork(
                decode_rows=len(limit),
                decode_tokens=float(candidates.tokens.sum()),
                restored_tokens=need * np.array([0.0, 1.0, 1.0, 1.0]),
                restored_squares=squares * np.array([0.0, 0.0, 1.0, 1.0]),
                restored_prefix=prefix * np.array([0.0, 0.0, 0.0, 1.0]),
            )
        ).tolist()
        rows = max(steps[1] - steps[0], FREE * steps[0]) / need
        within = max(steps[2] - steps[1], 0.0) / max(squares, 1.0)
        before = max(steps[3] - steps[2], 0.0) / max(prefix, 1.0)
        least = LEAST_CURVATURE * rows / max(float(limit.max(initial=0.0)), 1.0)
        linear = rows + before * candidates.shared
        return cls(weight, linear, max(within, least), candidates.evictable)


class EvictionProgram:
    """The program, canonicalised once per size and re-solved with new parameters.

    In x_i = n_i √(2 w_i q) the quadratic term is |x|²/2, which leaves parameters only where
    cvxpy can place them without canonicalising again: in the linear cost, in the one row of the
    covering constraint and in the bounds. The solver is Clarabel: unlike ADMM it needs no tuning
    to the scale of the data, and its answer does not depend on those it gave before.
    """

    def __init__(self) -> None:
        self._compiled = {size: _Compiled(size) for size in SIZES}

    def solve(self, costs: EvictionCosts, need: float) -> FloatArray:
        """The n_i at the optimum, float64 [requests]; all of u_i if `need` exceeds their sum.

        Most requests can be told to keep all or nothing beforehand (`_fixed`); the program is
        solved for the others.

        Raises:
            ArithmeticError: the solver did not converge.
        """
        tokens, free = _fixed(costs, need)
        left = need - float(tokens.sum())
        room = float(costs.limit[free].sum())
        if left <= 0:
            return tokens
        if left >= NEARLY_ALL * room:
            tokens[free] = costs.limit[free]
        else:
            tokens[free] = self._of_size(len(free)).solve(costs[free], left)
        return tokens

    def _of_size(self, count: int) -> _Compiled:
        size = next((s for s in self._compiled if s >= count), 0)
        if not size:
            size = SIZES[-1]
            while size < count:
                size *= 2
            self._compiled[size] = _Compiled(size)
        return self._compiled[size]


def _fixed(costs: EvictionCosts, need: float) -> tuple[FloatArray, IntArray]:
    """What the optimum must look like without solving: n_i where it is sure to be 0 or u_i, and
    the positions where it is not.

    At the optimum one price λ is paid for the last token of every request that has neither.
    It is no more than the price at which requests that would then be evicted whole cover the need,
    and no less than that at which those of which anything would be evicted could.
    """
    first = costs.weight * costs.linear
    last = first + 2 * costs.weight * costs.quadratic * costs.limit
    highest, lowest = _covering(last, costs.limit, need), _covering(first, costs.limit, need)
    full = last <= lowest
    tokens = np.where(full, costs.limit, 0).astype(np.float64)
    return tokens, np.flatnonzero(~full & (first < highest) & (costs.limit > 0))


def _covering(price: FloatArray, limit: IntArray, need: float) -> float:
    """The least price at which the limits of all requests priced no higher cover the need."""
    order = np.argsort(price)
    covered = np.searchsorted(np.cumsum(limit[order]), need)
    return float(price[order[covered]]) if covered < len(order) else np.inf


class _Compiled:
    """The program for up to `size` requests."""

    def __init__(self, size: int) -> None:
        self._x = cp.Variable(size)
        self._cost = cp.Parameter(size, nonneg=True)
        self._per_need = cp.Parameter(size, nonneg=True)
        self._limit = cp.Parameter(size, nonneg=True)
        self._problem = cp.Problem(
            cp.Minimize(cp.sum_squares(self._x) / 2 + self._cost @ self._x),  # type: ignore[attr-defined]  # cvxpy's stubs lack it
            [self._per_need @ self._x >= 1, self._x >= 0, self._x <= self._limit],
        )
        ones = np.ones(1)
        self.solve(EvictionCosts(ones, ones, 1.0, np.ones(1, np.int64)), need=0.5)

    def solve(self, costs: EvictionCosts, need: float) -> FloatArray:
        tokens_per_x = 1 / np.sqrt(2 * costs.weight * costs.quadratic)
        count = len(tokens_per_x)
        # x in units of its typical size, so that the solver sees numbers about 1.
        unit = need / count / float(tokens_per_x.mean())
        self._cost.value = self._padded(costs.weight * costs.linear * tokens_per_x / unit, 1.0)
        self._per_need.value = self._padded(tokens_per_x * unit / need, 0.0)
        self._limit.value = self._padded(costs.limit / tokens_per_x / unit, 1.0)
        self._problem.solve(solver=cp.CLARABEL, warm_start=True)  # type: ignore[no-untyped-call]  # so is cvxpy's solve
        if self._x.value is None:
            raise ArithmeticError(f"the eviction program was not solved: {self._problem.status}")
        tokens = self._x.value[:count] * tokens_per_x * unit
        return np.clip(tokens, 0, costs.limit)

    def _padded(self, values: FloatArray, fill: float) -> FloatArray:
        padded = np.full(self._x.size, fill)
        padded[: len(values)] = values
        return padded


def whole_blocks(
    costs: EvictionCosts, tokens: FloatArray, need: float, block_tokens: int
) -> IntArray:
    """Round evicted tokens to blocks, so that their sum is the least that covers `need`.

    From the nearest blocks on, the cheapest further ones are added or the dearest taken back.
    Costs are separable and convex, so where no single exchange helps the result is the optimum
    over whole blocks.

    Args:
        tokens: the program's optimum for `need`, or for one near it.

    Returns:
        n_i, int64 [requests], multiples of `block_tokens` and at most u_i.
    """
    limit = costs.limit // block_tokens
    blocks = np.minimum(np.rint(tokens / block_tokens).astype(np.int64), limit)
    target = min(-int(-need // block_tokens), int(limit.sum()))
    if short := target - int(blocks.sum()):
        _exchange(costs, blocks, limit, short, block_tokens)
    return blocks * block_tokens


def _exchange(
    costs: EvictionCosts, blocks: IntArray, limit: IntArray, short: int, block_tokens: int
) -> None:
    """Add `short` blocks where they cost least, or take -`short` where they cost most."""
    step = 1 if short > 0 else -1
    open_to = np.flatnonzero(blocks < limit if step > 0 else blocks > 0)
    # The k-th block of a request (from 0) costs w b (c + q b (2k + 1)).
    first = costs.weight * (costs.linear + costs.quadratic * block_tokens)
    slope = 2 * costs.quadratic * block_tokens * costs.weight
    ends_at = blocks if step > 0 else blocks - 1
    price = step * (first + slope * ends_at)
    heap = list(zip(price[open_to].tolist(), open_to.tolist(), strict=True))
    heapq.heapify(heap)
    for _ in range(abs(short)):
        cost, i = heap[0]
        blocks[i] += step
        if blocks[i] == (limit[i] if step > 0 else 0):
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (cost + float(slope[i]), i))
