"""The eviction program against optima found without it, and its rounding against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.optimize import brentq, minimize

from ellm_sgl.policies.problem.candidates import Candidates
from ellm_sgl.policies.slo_priority.levels import keep_weights, rank_levels
from ellm_sgl.policies.slo_priority.program import (
    SIZES,
    EvictionCosts,
    EvictionProgram,
    whole_blocks,
)
from ellm_sgl.policies.testing import Size, random_state

STATES = 300


@pytest.fixture(scope="module")
def program() -> EvictionProgram:
    return EvictionProgram()


def problem(seed: int, size: Size) -> tuple[EvictionCosts, int, int]:
    """Costs, need and block size, from a generated state and a random need."""
    rng = np.random.default_rng(seed)
    while True:
        state = random_state(rng, size)
        candidates = Candidates.of(state)
        block, most = state.memory.block_tokens, int(candidates.evictable.sum())
        if most > block:
            break
    need = max(1, int(rng.uniform(0, 1) * most) // block) * block
    level = rank_levels(state.running, state.waiting).running
    weights = keep_weights(level, state.running.tpot_slo_s, state.running.arrival_s)
    return EvictionCosts.of(state, candidates, weights, need), need, block


def total(costs: EvictionCosts, tokens: np.ndarray) -> float:
    """The program's objective at n_i = `tokens`, in weighted seconds."""
    return float((costs.weight * tokens * (costs.linear + costs.quadratic * tokens)).sum())


def by_price(costs: EvictionCosts, need: float) -> np.ndarray:
    """The optimum by its dual: at price λ what costs less than λ is evicted of each request."""

    def evicted(log_price: float) -> np.ndarray:
        spare = np.exp(log_price) / costs.weight - costs.linear
        return np.clip(spare / (2 * costs.quadratic), 0, costs.limit)

    lowest = np.log((costs.weight * costs.linear).min())
    dearest = costs.weight * (costs.linear + 2 * costs.quadratic * costs.limit)
    price = brentq(
        lambda p: evicted(p).sum() - need, lowest - 1, np.log(dearest.max()) + 1, xtol=1e-14
    )
    return evicted(price)


def test_within_one_percent_of_the_optimum(program: EvictionProgram) -> None:
    for seed in range(STATES):
        costs, need, _ = problem(seed, Size(running=256, waiting=0))
        tokens = program.solve(costs, need)
        assert tokens.sum() >= need * (1 - 1e-6), seed
        assert (tokens >= 0).all() and (tokens <= costs.limit).all(), seed
        assert total(costs, tokens) <= 1.01 * total(costs, by_price(costs, need)), seed


def test_within_one_percent_of_a_general_solver(program: EvictionProgram) -> None:
    """SLSQP knows nothing of prices; it is given small problems, in units of about 1."""
    for seed in range(40):
        costs, need, _ = problem(seed, Size(running=10, waiting=0, longest=4096))
        tokens = program.solve(costs, need)
        unit, scale = need / len(tokens), total(costs, tokens)
        start = costs.limit * (need / costs.limit.sum()) / unit
        best = minimize(
            lambda x, c=costs, u=unit, t=scale: total(c, x * u) / t,
            start,
            bounds=[(0, u / unit) for u in costs.limit],
            constraints={"type": "ineq", "fun": lambda x, u=unit, n=need: x.sum() * u / n - 1},
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-10},
        )
        assert best.fun >= 0.99, seed


def test_rounded_to_the_cheapest_whole_blocks(program: EvictionProgram) -> None:
    """Against all ways to evict so many blocks."""
    rng = np.random.default_rng(5)
    for _ in range(100):
        count, block = int(rng.integers(1, 5)), 16
        limit = rng.integers(0, 5, count)
        if limit.sum() == 0:
            continue
        costs = EvictionCosts(
            weight=8.0 ** rng.integers(0, 3, count) * rng.uniform(1, 2, count),
            linear=rng.uniform(1, 1.5, count),
            quadratic=float(rng.choice([1e-5, 1e-2, 1.0])),
            limit=limit * block,
        )
        need = rng.uniform(0, 1) * costs.limit.sum()
        tokens = whole_blocks(costs, program.solve(costs, need), need, block)
        assert tokens.sum() == -int(-need // block) * block
        assert (tokens % block == 0).all() and (tokens <= costs.limit).all()
        choices = (np.array(c) * block for c in product(*(range(n + 1) for n in limit)))
        best = min(total(costs, c) for c in choices if c.sum() >= need)
        assert total(costs, tokens) == pytest.approx(best, rel=1e-9)


def test_rounding_follows_a_need_that_has_drifted(program: EvictionProgram) -> None:
    """From the optimum for one need to another: no dearer than from that one's own optimum."""
    for seed in range(50):
        costs, need, block = problem(seed, Size(running=64, waiting=0))
        for other in (need * 0.9, need * 1.1):
            drifted = whole_blocks(costs, program.solve(costs, need), other, block)
            fresh = whole_blocks(costs, program.solve(costs, other), other, block)
            assert drifted.sum() == fresh.sum()
            assert total(costs, drifted) <= 1.001 * total(costs, fresh), seed


def test_the_program_is_compiled_once(program: EvictionProgram) -> None:
    compiled = program._compiled[SIZES[0]]._problem
    assert compiled.is_dpp()
    seen: list[object] = []
    for seed in range(5):
        costs, need, _ = problem(seed, Size(running=SIZES[0], waiting=0))
        program.solve(costs, need)
        seen.append(compiled._cache.param_prog)
    assert seen[0] is not None
    assert all(one is seen[0] for one in seen)


def test_larger_than_what_was_compiled_ahead() -> None:
    count = SIZES[-1] + 1
    costs = EvictionCosts(np.ones(count), np.ones(count), 1.0, np.full(count, 64))
    tokens = EvictionProgram().solve(costs, 32.0 * count)
    assert tokens == pytest.approx(np.full(count, 32.0), abs=0.01)


@pytest.mark.parametrize(
    ("need", "evicted"), [(0, [0, 0]), (64, [0, 64]), (128, [64, 64]), (999, [64, 64])]
)
def test_all_or_nothing(program: EvictionProgram, need: int, evicted: list[int]) -> None:
    costs = EvictionCosts(np.array([8.0, 1.0]), np.ones(2), 1e-6, np.array([64, 64]))
    assert program.solve(costs, need) == pytest.approx(evicted)
