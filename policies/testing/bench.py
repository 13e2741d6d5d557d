"""`ellm-sgl policies bench`: how long a policy takes to decide, on states of a busy server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, Policy, Ratios, SystemState
from ellm_sgl.policies.checks import check_batch, check_ratios, check_split
from ellm_sgl.policies.planned import step_work
from ellm_sgl.policies.registry import create
from ellm_sgl.policies.testing.generate import make_state, requests

RUNNING = 256
WAITING = 1024
BLOCK_TOKENS = 16
CALLS = 200
WARM_UP = 5
ROOM = (0.85, 1.6)
"""Device memory over what runs: from states in which memory or SLO leave little choice, to states
in which requests can be admitted."""
PRESSED = 0.95
"""In the steady state: nobody can be admitted, and some of what runs is not cached."""


@dataclass(frozen=True)
class Timing:
    """Times of one kind of call, in microseconds."""

    calls: int
    mean_us: float
    p50_us: float
    p99_us: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Timing:
        micro = np.array(list(seconds)) * 1e6
        p50, p99 = np.percentile(micro, (50, 99))
        return Timing(len(micro), float(micro.mean()), float(p50), float(p99))


@dataclass(frozen=True)
class PolicyBench:
    """Decision times of one policy; with 256 running and 1,024 waiting requests, unless asked about
    other states."""

    policy: str
    first_us: float
    """The first decision; a policy may build its program in it."""
    decision: Timing
    """`batch`, `ratio` and `split`, each time about other requests and another amount of
    memory, so that nothing worked out before still holds."""
    steady: Timing
    """The same questions, each time one token further and nothing else changed."""
    split: Timing
    """`split` alone."""
    checks: Timing
    """The server's checks of the three answers."""


def bench(
    name: str,
    options: Mapping[str, object],
    calls: int = CALLS,
    busy: Callable[[np.random.Generator, float], SystemState] | None = None,
) -> PolicyBench:
    """Time the policy registered as `name`; takes about a second for one that solves in 1 ms.

    Args:
        busy: draws the states, as `busy_state` does, which it is unless given.

    Raises:
        ConfigError: as `registry.create`.
        InvalidAnswer: it answered nonsense.
    """
    policy = create(name, options)
    rng, busy = np.random.default_rng(0), busy or busy_state
    state = busy(rng, PRESSED)
    first_s, batch, ratios, plan = _decide(policy, state)
    answer = policy.split(state, plan)

    def check() -> None:
        check_batch(state, batch)
        check_ratios(state, batch, ratios)
        check_split(answer)

    def split() -> None:
        policy.split(state, plan)

    check()
    others = (busy(rng, rng.uniform(*ROOM)) for _ in range(calls + WARM_UP))
    return PolicyBench(
        name,
        first_us=first_s * 1e6,
        decision=_timing(policy, others),
        steady=_timing(policy, _one_token_further(state, calls + WARM_UP)),
        split=Timing.of(_seconds(split) for _ in range(calls)),
        checks=Timing.of(_seconds(check) for _ in range(calls)),
    )


def busy_state(rng: np.random.Generator, room: float) -> SystemState:
    """A 7B model's server, whose device holds `room` times what its running requests need."""
    blocks = np.clip(rng.lognormal(3.7, 0.8, RUNNING + WAITING), 1, 512).astype(np.int64)
    tokens = blocks * BLOCK_TOKENS + 1
    priority = rng.integers(0, 3, len(tokens))
    slo_s = np.array([np.inf, 1.0, 0.5])[priority]
    waited_s = np.sort(rng.uniform(0.0, 30.0, WAITING))[::-1]
    running = requests(
        tokens[:RUNNING],
        request_id=np.arange(RUNNING),
        prompt_tokens=tokens[:RUNNING] * 3 // 4,
        priority=priority[:RUNNING],
        tpot_slo_s=slo_s[:RUNNING],
        tpot_s=rng.uniform(0.02, 0.1, RUNNING),
        waited_s=0.05,
    )
    waiting = requests(
        tokens[RUNNING:],
        request_id=np.arange(RUNNING, len(tokens)),
        priority=priority[RUNNING:],
        tpot_slo_s=slo_s[RUNNING:],
        arrival_s=1000.0 - waited_s,
        waited_s=waited_s,
    )
    held = (blocks[:RUNNING] + 1) * BLOCK_TOKENS
    device = int(held.sum() * room)
    short = max(0.0, 1.0 - device / held.sum())
    missing = np.minimum(np.ceil(short * held / BLOCK_TOKENS).astype(np.int64), blocks[:RUNNING])
    uncached = missing * BLOCK_TOKENS
    return make_state(
        replace(running, uncached_tokens=uncached),
        waiting,
        device_tokens=max(device, int((held - uncached).sum())),
        block_tokens=BLOCK_TOKENS,
        max_restored_tokens=int(running.tokens.sum()),
        staging_overhead=0.1,
        max_running=RUNNING + 64,
        tpot_slo_s=0.5,
    )


def _one_token_further(state: SystemState, count: int) -> Iterator[SystemState]:
    """Within the blocks that the requests have, so that memory stays as it is; then again."""
    for step in range(count):
        running = replace(state.running, tokens=state.running.tokens + step % BLOCK_TOKENS)
        passed = 0.05 * step
        yield replace(
            state,
            running=running,
            now_s=state.now_s + passed,
            busy_s=state.busy_s + passed,
        )


def _decide(policy: Policy, state: SystemState) -> tuple[float, Batch, Ratios, StepWork]:
    """What the three answers took, in seconds, and two of them; making the plan is the server's
    work."""
    start = time.perf_counter()
    batch = policy.batch(state)
    ratios = policy.ratio(state, batch)
    answered = time.perf_counter()
    plan = step_work(state, batch, ratios)
    planned = time.perf_counter()
    policy.split(state, plan)
    return (answered - start) + (time.perf_counter() - planned), batch, ratios, plan


def _timing(policy: Policy, states: Iterable[SystemState]) -> Timing:
    return Timing.of([_decide(policy, state)[0] for state in states][WARM_UP:])


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
