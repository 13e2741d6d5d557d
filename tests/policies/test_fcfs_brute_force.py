"""fcfs against every batch size and ratio there is, on generated states.

The reference is written without the policy's code: plain Python, one request at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Fcfs, SystemState
from ellm_sgl.policies.base import NO_GROWTH
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.problem.candidates import SLO_SHARE
from ellm_sgl.policies.testing import Size, random_state, requests

pytestmark = pytest.mark.slow

SIZE = Size(running=6, waiting=10, longest=1024)
GRID = 200
"""Ratios that the reference tries: multiples of 1 / GRID."""


@dataclass
class Request:
    tokens: int
    shared: int
    slo_s: float


@dataclass
class Outcome:
    """A batch size with what is evicted of each of its requests, judged by Eq. (1)."""

    value: float
    """b / T."""
    fits: bool
    restores: bool


class Reference:
    """Eq. (1) at the lengths of now, for one state."""

    def __init__(self, state: SystemState) -> None:
        self.state = state
        self.block = state.memory.block_tokens
        self.requests = [
            Request(int(s), int(a), float(slo))
            for part in (state.running, state.waiting)
            for s, a, slo in zip(part.tokens, part.shared_tokens, part.tpot_slo_s, strict=True)
        ]
        resident = 0
        for s, a, u in zip(
            state.running.tokens.tolist(),
            state.running.shared_tokens.tolist(),
            state.running.uncached_tokens.tolist(),
            strict=True,
        ):
            resident += max(0, self.blocks(s) - self.blocks(a) - self.blocks(u)) * self.block
        used = state.memory.device_tokens - state.memory.device_free_tokens
        self.others = max(0, used - resident)

    def blocks(self, tokens: int) -> int:
        return (tokens + self.block - 1) // self.block

    def evicted_of(self, request: Request, ratio: float) -> int:
        most = max(0, (request.tokens - 1) // self.block - self.blocks(request.shared))
        return min(int(ratio * request.tokens) // self.block, most) * self.block

    def judge(self, tokens_evicted: list[int]) -> Outcome:
        """The first len(tokens_evicted) requests run, and so many tokens of each are evicted."""
        memory, batch = self.state.memory, self.requests[: len(tokens_evicted)]
        needed: float = self.others + sum(
            (self.blocks(r.tokens + 1) - self.blocks(r.shared)) * self.block - n
            for r, n in zip(batch, tokens_evicted, strict=True)
        )
        needed += memory.staging_overhead * sum(tokens_evicted)
        work = StepWork(
            decode_rows=len(batch),
            decode_tokens=sum(r.tokens for r in batch),
            restored_tokens=sum(tokens_evicted),
            restored_squares=sum(n * n for n in tokens_evicted),
            restored_prefix=sum(n * r.shared for r, n in zip(batch, tokens_evicted, strict=True)),
        )
        seconds = float(self.state.latency.step_seconds(work))
        slo_s = min((self.slo_s(r) for r in batch), default=math.inf)
        waited_s = max(self.state.running.waited_s.tolist(), default=0.0)
        return Outcome(
            value=len(batch) / seconds,
            fits=needed <= memory.device_tokens + 1e-6
            and sum(tokens_evicted) <= memory.max_restored_tokens
            and seconds + waited_s <= slo_s,
            restores=sum(tokens_evicted) > 0,
        )

    def slo_s(self, request: Request) -> float:
        """The least of the SLOs that it would not miss even alone."""
        alone = StepWork(decode_rows=1, decode_tokens=request.tokens)
        least_s = self.state.pace * float(self.state.latency.step_seconds(alone)) / SLO_SHARE
        slos_s = request.slo_s, self.state.tpot_slo_s
        return min((each for each in slos_s if each >= least_s), default=math.inf)

    def sizes(self) -> range:
        running = len(self.state.running)
        most = min(len(self.requests), max(running, self.state.max_running))
        return range(max(1, running), most + 1)

    def best(self) -> tuple[float, int]:
        """Highest b / T of the grid, with at least all that fit while nothing is restored; and
        how many these are. (0.0, 0) if nothing fits."""
        cached = [b for b in self.sizes() if self.judge([0] * b).fits]
        fewest = max(cached, default=0)
        found = [
            outcome.value
            for b in self.sizes()
            if b >= fewest
            for k in range(GRID)
            if (
                outcome := self.judge([self.evicted_of(r, k / GRID) for r in self.requests[:b]])
            ).fits
        ]
        return max(found, default=0.0), fewest


def state_of(seed: int) -> SystemState:
    """A pool that cannot grow: with one that can, fcfs decides as if it had (`fcfs.growth`)."""
    state = random_state(np.random.default_rng(seed), SIZE)
    memory = replace(state.memory, growth=NO_GROWTH)
    return replace(state, memory=memory, prefilling=requests([]))


def evicted(state: SystemState) -> list[int]:
    """What the policy evicts of each request of its batch."""
    policy = Fcfs(forecast=False, pause=False)
    batch = policy.batch(state)
    ratios = policy.ratio(state, batch)
    tokens = np.append(state.running.tokens, state.waiting.tokens[: len(batch.admit)])
    running = planned_tokens(state.running, ratios.running, state.memory.block_tokens)
    admitted = ratios.admitted * tokens[len(running) :] // state.memory.block_tokens
    return [*running.tolist(), *(admitted.astype(int) * state.memory.block_tokens).tolist()]


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 350, 50)])
def test_the_answer_fits_and_is_within_a_percent_of_the_best(seeds: range) -> None:
    for seed in seeds:
        state = state_of(seed)
        reference = Reference(state)
        if not reference.requests:
            continue
        tokens_evicted = evicted(state)
        answer = reference.judge(tokens_evicted)
        best, fewest = reference.best()
        if best == 0.0 and not answer.fits:
            assert len(tokens_evicted) == reference.sizes().start, seed  # nobody else is admitted
            continue
        assert answer.fits, seed
        assert len(tokens_evicted) >= fewest, seed
        assert answer.value >= 0.99 * best, (seed, answer, best)


def test_the_states_put_the_policy_to_the_test() -> None:
    """Enough of them restore, are bounded by the SLO, or have no answer."""
    kinds = {"cached": 0, "restores": 0, "hopeless": 0, "admits though it restores": 0}
    for seed in range(350):
        state = state_of(seed)
        reference = Reference(state)
        if reference.requests:
            tokens_evicted = evicted(state)
            answer = reference.judge(tokens_evicted)
            kinds["hopeless"] += not answer.fits
            kinds["restores"] += answer.fits and answer.restores
            kinds["cached"] += answer.fits and not answer.restores
            admits = len(tokens_evicted) > reference.sizes().start
            kinds["admits though it restores"] += answer.fits and answer.restores and admits
    assert min(kinds.values()) >= 10, kinds
