"""The paper's solver: SLSQP on the continuous relaxation, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from ellm_sgl.policies import Fcfs, SystemState
from ellm_sgl.policies.fcfs import relaxation
from ellm_sgl.policies.fcfs.relaxation import Relaxation
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.testing import (
    PROFILES,
    SHAPES,
    Size,
    make_state,
    random_state,
    requests,
)


def problem_of(state: SystemState) -> BatchProblem | None:
    most = min(len(state.waiting), state.max_running - len(state.running))
    return BatchProblem.of(state, most) if most > 0 else None


def problems() -> Iterator[BatchProblem]:
    for seed in range(200):
        if problem := problem_of(random_state(np.random.default_rng(seed), Size(16, 32, 2048))):
            yield problem


def tokens_per_second(problem: BatchProblem, size: int) -> float:
    _, seconds, _ = problem.least(np.array([size]))
    return float(size / seconds[0])


def test_what_it_finds_fits_wherever_something_does() -> None:
    for problem in problems():
        size = Relaxation().solve(problem)
        _, _, fits = problem.least(np.array([problem.fewest, size]))
        assert fits[1] or (size == problem.fewest and not fits[0])


def test_it_is_never_better_than_looking_at_every_size() -> None:
    for problem in problems():
        exact, local = problem.solve(), Relaxation().solve(problem)
        assert tokens_per_second(problem, local) <= 1.01 * tokens_per_second(problem, exact)


def crowd(tokens: int, model: str = "llama2-7b") -> SystemState:
    """8 short requests run, 100 wait, 16 fit: reading the weights takes so long that it pays to
    restore much beside it."""
    return make_state(
        requests([tokens] * 8),
        requests([tokens] * 100, request_id=np.arange(8, 108)),
        device_tokens=16 * tokens,
        block_tokens=1,
        model=SHAPES[model],
        hardware=PROFILES["h100"],
    )


def both(problem: BatchProblem | None) -> tuple[float, float]:
    """Tokens per second of the exact answer and of SLSQP's; more than fit without restoring."""
    assert problem is not None
    exact = problem.solve()
    assert exact > 16
    return (
        tokens_per_second(problem, exact),
        tokens_per_second(problem, Relaxation().solve(problem)),
    )


@pytest.mark.parametrize("tokens", [6, 9])
def test_requests_of_one_length_get_the_exact_answer(tokens: int) -> None:
    exact, local = both(problem_of(crowd(tokens)))
    assert local == pytest.approx(exact, rel=0.01)


def test_it_may_stop_at_a_local_optimum() -> None:
    """Why it is not the default: rows that go through further experts cost more than they gain,
    until all experts are read anyway."""
    exact, local = both(problem_of(crowd(24, "mixtral-8x7b-tp2")))
    assert local < 0.6 * exact


def test_the_next_problem_starts_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []

    def record(*args: Any, **kw: Any) -> Any:
        runs.append(minimize(*args, **kw))
        return runs[-1]

    monkeypatch.setattr(relaxation, "minimize", record)
    solver, problem = Relaxation(), problem_of(crowd(9))
    assert problem is not None
    first = solver.solve(problem)
    assert solver.solve(problem) == first
    cold, warm = runs
    assert warm.nfev < cold.nfev
    assert warm.x == pytest.approx(cold.x, rel=0.01)


def test_a_policy_uses_it_if_told_to() -> None:
    state = crowd(24, "mixtral-8x7b-tp2")
    policies = Fcfs(forecast=False, pause=False), Fcfs(forecast=False, pause=False, solver="slsqp")
    exact, local = (len(policy.batch(state).admit) for policy in policies)
    assert local < exact


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(ValueError, match="'simplex'"):
        Fcfs(solver="simplex")
