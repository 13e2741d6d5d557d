"""A server in numbers, for policies that tell requests apart: prefill stalls decoding, memory runs
short, requests pause. After `policies.testing.starvation`, with the times of the CPU server."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies.base import Policy, Requests, SystemState
from ellm_sgl.policies.checks import check_batch, check_ratios
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.testing import make_state, requests

BLOCK = 16


class CpuServer(LatencyModel):
    """Measured on two cores: 24 rows take about 52 ms, 4 rows 12 ms, a recomputed or prompt token
    0.1 ms."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        rows = 2e-3 * work.decode_rows + 1e-4 * (work.restored_tokens + work.prefill_rows)
        pairs = 1e-8 * (work.restored_pairs + work.prefill_pairs)
        return np.asarray(4e-3 + rows + pairs + 1e-7 * work.decode_tokens, np.float64)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class Request:
    """One request; `output` tokens are generated in the end."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    priority: int = 0
    tpot_slo_s: float = np.inf
    max_new: int = 256
    done: int = 0
    uncached: int = 0
    first_s: float = np.nan
    last_s: float = np.nan
    longest_gap: int = 0
    """Most decode steps from one token to the next."""
    gap: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.done

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.output - 1)


@dataclass
class Simulation:
    """Serves `trace` (sorted by arrival) under `policy`."""

    policy: Policy
    trace: list[Request]
    device_tokens: int
    max_running: int = 32
    now_s: float = 0.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    decided: int = 0

    def __post_init__(self) -> None:
        self.latency = CpuServer()
        self._coming = list(reversed(self.trace))

    def run(self, until_s: float = np.inf) -> Simulation:
        """Until all are served, or so much time has passed."""
        while (self._coming or self.waiting or self.running) and self.now_s < until_s:
            if not (self.waiting or self.running):
                self.now_s = max(self.now_s, self._coming[-1].arrival_s)
            while self._coming and self._coming[-1].arrival_s <= self.now_s:
                self.waiting.append(self._coming.pop())
            self._iterate()
        return self

    def of(self, priority: int) -> list[Request]:
        return [r for r in self.finished if r.priority == priority]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(r.done for r in self.finished) / self.now_s

    def _iterate(self) -> None:
        state = self.state()
        batch = self.policy.batch(state)
        check_batch(state, batch)
        ratios = self.policy.ratio(state, batch)
        check_ratios(state, batch, ratios)
        self.decided += 1
        targets = planned_tokens(state.running, ratios.running, BLOCK)
        for request, target in zip(self.running, targets.tolist(), strict=True):
            request.uncached = target
        admitted = self._admit([self.waiting[i] for i in batch.admit])
        if admitted:
            self._prefill(admitted)
        else:
            self._decode(set(batch.pause))
        self._evict()

    def _admit(self, wanted: list[Request]) -> list[Request]:
        admitted: list[Request] = []
        for request in wanted:
            alone = not self.running and not admitted
            if not alone and request.tokens + BLOCK > self._free() - sum(map(_held, admitted)):
                break
            admitted.append(request)
        self.waiting = [r for r in self.waiting if r not in admitted]
        return admitted

    def _prefill(self, admitted: list[Request]) -> None:
        new = np.array([r.tokens for r in admitted], float)
        work = StepWork(0, 0, prefill_rows=new.sum(), prefill_pairs=(new * new).sum() / 2)
        self.now_s += float(self.latency.step_seconds(work))
        self.running += admitted
        for request in admitted:
            request.first_s = self.now_s
            self._token(request)
        self._leave()

    def _decode(self, paused: set[int]) -> None:
        those = [r for i, r in enumerate(self.running) if i not in paused]
        uncached = np.array([r.uncached for r in those], float)
        work = StepWork(
            len(those), sum(r.tokens for r in those), uncached.sum(), (uncached * uncached).sum()
        )
        self.now_s += float(self.latency.step_seconds(work))
        for request in self.running:
            request.gap += 1
        for request in those:
            request.longest_gap = max(request.longest_gap, request.gap)
            self._token(request)
        self._leave()

    def _token(self, request: Request) -> None:
        request.gap = 0
        request.done += 1
        request.last_s = self.now_s

    def _leave(self) -> None:
        self.finished += [r for r in self.running if r.done >= r.output]
        self.running = [r for r in self.running if r.done < r.output]

    def _evict(self) -> None:
        """What pressure takes beyond the targets: blocks of the request that misses least."""
        while self._free() < 0:
            able = [r for r in self.running if r.uncached + BLOCK < r.tokens]
            min(able, key=lambda r: r.uncached).uncached += BLOCK

    def _free(self) -> int:
        return self.device_tokens - sum(map(_held, self.running))

    def state(self) -> SystemState:
        return make_state(
            self._columns(self.running),
            self._columns(self.waiting),
            device_tokens=self.device_tokens,
            device_free_tokens=max(0, self._free()),
            block_tokens=BLOCK,
            max_running=self.max_running,
            latency=self.latency,
            now_s=self.now_s,
        )

    def _columns(self, those: list[Request]) -> Requests:
        return requests(
            [r.tokens for r in those],
            request_id=[r.number for r in those],
            prompt_tokens=[r.prompt for r in those],
            max_new_tokens=[r.max_new for r in those],
            uncached_tokens=[r.uncached for r in those],
            arrival_s=[r.arrival_s for r in those],
            waited_s=[self.now_s - (r.last_s if r.done else r.arrival_s) for r in those],
            priority=[r.priority for r in those],
            tpot_slo_s=[r.tpot_slo_s for r in those],
        )


def _held(request: Request) -> int:
    """Device tokens of a request, in whole blocks."""
    return -(-(request.tokens - request.uncached) // BLOCK) * BLOCK


def two_classes(
    rng: np.random.Generator,
    count: int,
    per_second: float,
    urgent_share: float,
    tpot_slo_s: float = np.inf,
) -> list[Request]:
    """A trace: Poisson arrivals, prompts of 64 to 256 tokens, outputs of 32 to 256."""
    arrivals = np.cumsum(rng.exponential(1 / per_second, count))
    urgent = rng.random(count) < urgent_share
    return [
        Request(
            number=i,
            arrival_s=float(arrivals[i]),
            prompt=int(rng.integers(64, 257)),
            output=int(rng.integers(32, 257)),
            priority=int(urgent[i]),
            tpot_slo_s=tpot_slo_s if urgent[i] else np.inf,
        )
        for i in range(count)
    ]
