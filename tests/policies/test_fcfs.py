"""fcfs: the answers worked out by hand, and how they follow a load."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies import Batch, Fcfs, Policy, Requests, SystemState
from ellm_sgl.policies.base import IntArray
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.slo_priority import SloPriority
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.known_lengths import TO_THE_BOUND

BLOCK = 10


class Linear(LatencyModel):
    """A millisecond per step and per request, and as much as asked for per restored token."""

    def __init__(self, token_ms: float) -> None:
        self._token_ms = token_ms

    def step_seconds(self, work: StepWork) -> FloatArray:
        return np.asarray(1e-3 * (1 + work.decode_rows + self._token_ms * work.restored_tokens))

    def observe(self, work: StepWork, seconds: float) -> None: ...


briefly = partial(requests, max_new_tokens=16)


def scene(
    running: Requests, waiting: Requests, device_tokens: int, token_ms: float = 0.0, **kw: float
) -> SystemState:
    return make_state(
        running,
        replace(waiting, request_id=waiting.request_id + 1000),
        device_tokens=device_tokens,
        block_tokens=BLOCK,
        latency=Linear(token_ms),
        lengths=TO_THE_BOUND,
        **kw,  # type: ignore[arg-type]
    )


def answers(state: SystemState, policy: Fcfs | None = None) -> tuple[int, IntArray, IntArray]:
    """Requests admitted, and the tokens that are evicted of running and admitted requests."""
    policy = policy or Fcfs(forecast=False, pause=False)
    batch = policy.batch(state)
    ratios = policy.ratio(state, batch)
    assert batch.admit == tuple(range(len(batch.admit))) and batch.pause == ()
    admitted = Requests(**{n: c[: len(batch.admit)] for n, c in vars(state.waiting).items()})
    block = state.memory.block_tokens
    return (
        len(batch.admit),
        planned_tokens(state.running, ratios.running, block),
        planned_tokens(admitted, ratios.admitted, block),
    )


# Each request of 95 tokens is charged for 10 blocks (100 tokens), 9 of which can be evicted.


def test_all_that_fit_are_admitted_and_stay_cached() -> None:
    count, running, admitted = answers(scene(requests([95]), requests([95] * 5), 400, 1.0))
    assert count == 3
    assert not running.any() and not admitted.any()


def test_more_are_admitted_if_restoring_costs_nothing() -> None:
    # Six requests are charged 600 of 400 tokens: 20 blocks go, of 54.
    count, running, admitted = answers(scene(requests([95]), requests([95] * 5), 400))
    assert count == 5
    assert running.sum() + admitted.sum() == 200
    assert set(running) | set(admitted) <= {30, 40}


def test_those_admitted_to_be_restored_tell_what_they_will_come_to() -> None:
    # Cached, four of the six fit. At 95 + 40 tokens each is charged 14 blocks: 440 of 840 tokens
    # go, of 6 x 135.
    state = scene(requests([95], max_new_tokens=40), requests([95] * 5, max_new_tokens=40), 400)
    policy = Fcfs(pause=False)
    ratios = policy.ratio(state, policy.batch(state))
    assert ratios.admitted == pytest.approx(np.full(5, 440 / 810))
    larger = replace(state, memory=replace(state.memory, device_tokens=600, device_free_tokens=500))
    ratios = policy.ratio(larger, Batch(admit=tuple(range(5))))
    assert ratios.admitted == pytest.approx(np.full(5, 240 / 810))
    ample = replace(state, memory=replace(state.memory, device_tokens=900, device_free_tokens=800))
    policy = Fcfs(pause=False)
    assert not policy.ratio(ample, policy.batch(ample)).admitted.any()


def test_nobody_else_is_admitted_if_restoring_costs_more_than_it_gains() -> None:
    # b / T: 4 / 5 with all cached. A fifth restores 100 tokens: 5 / (6 + 100 c) is less for any
    # c above 0.0025 (5 / 6.25 = 0.8), and a sixth, 6 / (7 + 200 c), for any above 0.0025 too.
    assert answers(scene(requests([95]), requests([95] * 5), 400, 0.0030))[0] == 3
    assert answers(scene(requests([95]), requests([95] * 5), 400, 0.0020))[0] == 5


def test_memory_of_a_step_counts_for_every_token_it_restores() -> None:
    # Short by 100 tokens; with M_o of 0.2 tokens for each restored one, 130 have to go: 104 gained.
    state = scene(requests([95] * 5), requests([]), 400, staging_overhead=0.2)
    assert answers(state)[1].sum() == 130


@pytest.mark.parametrize("policy", [Fcfs(pause=False), SloPriority()])
def test_where_nothing_can_be_fetched_no_more_goes_than_is_missing(policy: Policy) -> None:
    """A host tier and so few layer groups that what is fetched takes as much room as what went:
    it is computed again. Of requests that run, whatever their classes."""
    running = requests([95] * 5, priority=[1, 0, 0, 0, 0])
    state = scene(running, requests([]), 400, staging_overhead=1.0)
    ratios = policy.ratio(state, Batch(()))
    assert 100 <= planned_tokens(running, ratios.running, BLOCK).sum() <= 150
    ample = replace(state.memory, device_tokens=900, device_free_tokens=500)
    ratios = policy.ratio(replace(state, memory=ample), Batch(()))
    assert not planned_tokens(running, ratios.running, BLOCK).any(), "it comes back with room"


def test_a_step_restores_no_more_than_it_may() -> None:
    state = scene(requests([95] * 5), requests([95]), 300, max_restored_tokens=150)
    count, running, _ = answers(state)
    assert count == 0
    assert running.sum() == 150  # 200 would have to go


def test_shared_blocks_stay_and_are_counted_once() -> None:
    # A prefix of 50 tokens and 5 blocks of their own each: 50 + 3 x 50 = 200 tokens.
    three = requests([95] * 3, shared_tokens=50)
    assert not answers(scene(three, requests([]), 200))[1].any()
    # 120 tokens short: only 4 blocks of each may go.
    three = requests([95] * 3, shared_tokens=50, uncached_tokens=40)
    assert list(answers(scene(three, requests([]), 80))[1]) == [40, 40, 40]


def test_the_slo_bounds_the_batch() -> None:
    # T = 1 + b ms; SLO 5 ms, and one request has waited 2 ms since its last token: b <= 2.
    state = scene(requests([95], waited_s=0.002), requests([95] * 5), 10_000, tpot_slo_s=0.005)
    assert answers(state)[0] == 1
    assert answers(replace(state, tpot_slo_s=np.inf))[0] == 5


def test_the_slo_of_a_request_bounds_every_batch_that_it_is_in() -> None:
    # The third waiting request allows 4 ms, so 3 requests: it and the later ones wait.
    waiting = requests([95] * 5, tpot_slo_s=[np.inf, np.inf, 0.004, np.inf, np.inf])
    assert answers(scene(requests([95]), waiting, 10_000))[0] == 2
    strict = requests([95], tpot_slo_s=0.003)
    assert answers(scene(strict, requests([95] * 5), 10_000))[0] == 1


def test_an_slo_that_a_request_would_miss_even_alone_holds_nobody_back() -> None:
    # T = 2 ms for one request. Whoever asks for less gets what there is, as do all others.
    impossible, waiting = requests([95], tpot_slo_s=0.0019), requests([95] * 5)
    assert answers(scene(impossible, waiting, 10_000))[0] == 5
    assert answers(scene(impossible, waiting, 10_000, tpot_slo_s=0.0045))[0] == 2
    first = requests([95] * 5, tpot_slo_s=[0.001, *[np.inf] * 4])
    assert answers(scene(requests([95]), first, 10_000))[0] == 5
    assert answers(scene(requests([95]), waiting, 10_000, tpot_slo_s=0.001))[0] == 5


def test_the_slo_bounds_what_is_restored() -> None:
    # Restoring costs 0.002 ms a token: 5 of 5 would be admitted (b / T), at T = 7.4 ms.
    state = scene(requests([95]), requests([95] * 5), 400, 0.002)
    assert answers(state)[0] == 5
    assert answers(replace(state, tpot_slo_s=0.0073))[0] == 4


def test_running_requests_stay_where_nothing_keeps_the_slo() -> None:
    state = scene(requests([95] * 5), requests([95]), 400, 0.1, tpot_slo_s=0.001)
    count, running, _ = answers(state)
    assert count == 0
    assert running.sum() == 100  # the least that fits


def test_a_request_that_would_be_alone_is_admitted_whatever_it_needs() -> None:
    state = scene(requests([]), requests([950, 95]), 400, 0.1, tpot_slo_s=0.01)
    count, _, admitted = answers(state)
    assert count == 1
    assert list(admitted) == [560]  # 96 blocks less 40


def test_no_more_than_may_run_at_once() -> None:
    state = scene(requests([95] * 2), requests([95] * 5), 10_000)
    assert answers(replace(state, max_running=4))[0] == 2
    assert answers(replace(state, max_running=2))[0] == 0


def test_who_is_admitted_must_fit_until_all_have_ended() -> None:
    # Where answers go on to their bounds the first comes to 230 tokens, the other meanwhile to
    # 222: 23 blocks each.
    both = requests([102], prompt_tokens=95, max_new_tokens=135), requests([95], max_new_tokens=135)
    state = scene(*both, 460, token_ms=0.1)
    assert answers(state, Fcfs())[0] == 1
    state = scene(*both, 300, token_ms=0.1)
    assert answers(state, Fcfs(pause=False))[0] == 0
    assert answers(state, Fcfs())[0] == 1  # it pauses meanwhile,
    assert answers(replace(state, tpot_slo_s=0.005), Fcfs())[0] == 0  # too long for its SLO
    costly = scene(
        *both, 300, token_ms=1.0
    )  # where what is evicted meanwhile takes long to restore
    assert answers(costly, Fcfs())[0] == 0
    # Where that is certain, also with a host tier; where they are not expected to be short, but may
    # be, it counts that they take turns: 3 ms a token while both fit, then 4 ms, 3.4 in the mean.
    host = replace(state, memory=replace(state.memory, host_tokens=1000))
    for slo_s, certain, in_doubt in ((0.01, 1, 1), (0.0038, 0, 1), (0.0035, 0, 0)):
        forecast = Forecast.of(replace(host, tpot_slo_s=slo_s), 1)
        assert forecast.solve() - 1 == certain
        doubtful = replace(forecast, expected_short=np.full_like(forecast.short, -1.0))
        assert doubtful.solve() - 1 == in_doubt
    assert answers(state, Fcfs(forecast=False, pause=False))[0] == 1
    # One that is nearly done grows no further.
    ending = replace(state, running=requests([102], max_new_tokens=8, prompt_tokens=95))
    assert answers(ending, Fcfs())[0] == 1


def test_the_papers_solver_is_for_the_papers_problem() -> None:
    with pytest.raises(ValueError, match="forecast false"):
        Fcfs(solver="slsqp")


# -- over time ------------------------------------------------------------------------------


def crowd(device_tokens: int, tokens: int = 1000) -> SystemState:
    return scene(requests([tokens] * 20), requests([]), device_tokens)


def test_a_steady_load_gives_a_steady_ratio() -> None:
    policy = Fcfs()
    evicted = [answers(crowd(15_000 + wobble), policy)[1] for wobble in (0, 100, 50, 120, 0, 80)]
    assert evicted[0].any()
    assert all(np.array_equal(evicted[0], g) for g in evicted)


def test_the_ratio_follows_a_load_that_changes() -> None:
    policy = Fcfs()
    evicted = [
        int(answers(crowd(device), policy)[1].sum())
        for device in (21_000, 18_000, 12_000, 18_000, 20_190, 20_200)
    ]
    assert evicted == [0, 2200, 8200, 2200, 10, 0]


def test_nobody_is_admitted_until_something_has_changed() -> None:
    policy = Fcfs(forecast=False, pause=False)
    full = scene(requests([95] * 4), requests([95]), 400, 1.0)
    assert answers(full, policy)[0] == 0
    left = scene(requests([95] * 3, request_id=[0, 1, 3]), requests([95]), 400, 1.0)
    assert answers(left, policy)[0] == 1
    assert answers(full, policy)[0] == 0
    other = scene(requests([95] * 4), requests([5], request_id=[1]), 410, 1.0)
    assert answers(other, policy)[0] == 1


@pytest.mark.parametrize(
    ("tokens", "forecast", "free", "admitted"),
    [
        (95, False, (50, 100), (0, 1)),  # memory that cached prefixes gave back
        (79, True, (160, 0), (1, 0)),  # or took, before the server has let them in
    ],
)
def test_an_answer_is_thought_over_now_and_then(
    tokens: int, forecast: bool, free: tuple[int, int], admitted: tuple[int, int]
) -> None:
    policy = Fcfs(forecast=forecast, pause=False)
    running, waiting = briefly([tokens] * 3), briefly([tokens])
    before = scene(running, waiting, 400, 1.0, device_free_tokens=free[0])
    after = replace(before, memory=replace(before.memory, device_free_tokens=free[1]))
    assert answers(before, policy)[0] == admitted[0]
    count = [answers(after, policy)[0] for _ in range(16)]
    assert count == [admitted[0]] * 15 + [admitted[1]]


def test_a_refusal_ends_when_the_slo_allows_more() -> None:
    # T = 1 + b ms: with 2 requests 3 ms of 5, less the time since the last token.
    policy = Fcfs(forecast=False, pause=False)
    late = scene(requests([95], waited_s=0.003), requests([95]), 400, 1.0, tpot_slo_s=0.005)
    assert answers(late, policy)[0] == 0
    assert answers(late, policy)[0] == 0
    prompt = scene(requests([95], waited_s=0.001), requests([95]), 400, 1.0, tpot_slo_s=0.005)
    assert answers(prompt, policy)[0] == 1


@pytest.mark.parametrize(
    ("forecast", "changes", "admitted"),
    [
        (True, {}, 1),
        (True, {"waiting": briefly([79] * 2)}, 0),  # somebody has come
        (True, {"waiting": briefly([79], request_id=[7])}, 0),
        (True, {"running": briefly([79] * 3, request_id=[0, 1, 3])}, 0),
        (True, {"tpot_slo_s": 0.999}, 0),
        (False, {}, 0),  # the paper's problem, which does not look ahead
    ],
)
def test_what_ends_an_answer_early(forecast: bool, changes: dict[str, Any], admitted: int) -> None:
    policy = Fcfs(forecast=forecast, pause=False)
    before = scene(briefly([79] * 3), briefly([79]), 400, 1.0, device_free_tokens=160)
    before = replace(before, tpot_slo_s=1.0)
    assert answers(before, policy)[0] == 1
    after = replace(before, memory=replace(before.memory, device_free_tokens=0), **changes)
    assert answers(after, policy)[0] == admitted


# -- over generated states ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_more_memory_gives_up_no_more(seed: int) -> None:
    state = random_state(np.random.default_rng(seed), Size(64, 0))
    free = state.memory.device_free_tokens
    evicted = []
    for more in (0, 64, 512, 4096, 32_768):
        memory = replace(
            state.memory,
            device_tokens=state.memory.device_tokens + more,
            device_free_tokens=free + more,
        )
        evicted.append(answers(replace(state, memory=memory))[1].sum())
    assert evicted == sorted(evicted, reverse=True)


def test_equal_states_get_equal_answers() -> None:
    first, second = Fcfs(), Fcfs()
    for seed in range(60):
        state = random_state(np.random.default_rng(seed), Size(32, 64))
        batch = first.batch(state)
        assert batch == second.batch(state)
        ours, theirs = first.ratio(state, batch), second.ratio(state, batch)
        assert np.array_equal(ours.running, theirs.running)
        assert np.array_equal(ours.admitted, theirs.admitted)


def test_ratios_are_given_for_the_batch_asked_about() -> None:
    state = scene(requests([95] * 2), requests([95] * 5), 300)
    ratios = Fcfs().ratio(state, Batch(admit=(4, 2)))
    assert len(ratios.running) == 2 and len(ratios.admitted) == 2
    assert ratios.admitted.max() > 0.0
