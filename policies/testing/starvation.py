"""A server in numbers that is never idle, to find requests that a policy forgets.

In each scene a few requests compete with a stream of others that never ends: as soon as one of
those is admitted, the next one arrives. The few wait when it starts, or run already. Whatever order
a policy prefers, one of the scenes offers it requests that it likes better, for ever. A policy that
lets waiting time count passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies.base import (
    Batch,
    EndedRequest,
    Policy,
    Ratios,
    Requests,
    StepReport,
    SystemState,
)
from ellm_sgl.policies.checks import checked_answers
from ellm_sgl.policies.lengths import OutputLengths, Seen
from ellm_sgl.policies.planned import planned_tokens, select, step_work
from ellm_sgl.policies.testing.generate import make_state, requests

BLOCK_TOKENS = 16
DEVICE_TOKENS = 2048
MAX_RUNNING = 8
PENDING = 12
"""Requests of the endless stream that wait at any time."""


@dataclass(frozen=True)
class Kind:
    """What requests of one kind have in common."""

    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    tpot_slo_s: float = np.inf


@dataclass(frozen=True)
class Scene:
    """A few requests, and the stream that competes with them."""

    name: str
    few: Kind
    stream: Kind
    head_start: int = 0
    """Steps before the stream starts: the few run then."""


SHORT_AND_URGENT = Kind(96, 24, priority=5, tpot_slo_s=2.0)
LONG_AND_PATIENT = Kind(900, 48, priority=-5)
SCENES = (
    Scene("long requests in a stream of short, urgent ones", LONG_AND_PATIENT, SHORT_AND_URGENT),
    Scene("short requests in a stream of long ones", Kind(32, 24), Kind(600, 48, priority=5)),
    Scene("urgent requests in a stream of patient ones", SHORT_AND_URGENT, LONG_AND_PATIENT),
    Scene("old requests in a stream of new, equal ones", Kind(256, 32), Kind(256, 32)),
    Scene(
        "running requests, as many as memory holds, in a stream of urgent ones",
        Kind(640, 96, priority=-5),
        Kind(330, 24, priority=5, tpot_slo_s=2.0),
        head_start=10,
    ),
)


class SlowMachine(LatencyModel):
    """A step takes about a second, so that minutes pass in a few hundred decisions."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        rows = work.decode_rows + 0.02 * (work.restored_tokens + work.prefill_rows)
        return np.asarray(1.0 + 0.05 * rows + 1e-5 * work.decode_tokens, np.float64)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Nothing to learn."""


@dataclass
class _Request:
    request_id: int
    kind: Kind
    arrival_s: float
    last_token_s: float
    """When it got its last token; while it waits, when it arrived."""
    admitted_s: float = 0.0
    uncached: int = 0
    output: int = 0

    @property
    def output_tokens(self) -> int:
        """Unequal, so that the stream's requests do not all end in one step."""
        return self.kind.output_tokens + 5 * self.request_id % 11

    @property
    def tokens(self) -> int:
        return self.kind.prompt_tokens + self.output

    @property
    def kept(self) -> int:
        return self.tokens - self.uncached


@dataclass
class Server:
    """Serves a scene, one decision of `policy` per step."""

    policy: Policy
    scene: Scene
    now_s: float = 1000.0
    running: list[_Request] = field(default_factory=list)
    waiting: list[_Request] = field(default_factory=list)
    arrived: int = 0
    steps: int = 0
    last_step: StepReport | None = None
    latency: LatencyModel = field(default_factory=SlowMachine)
    seen: Seen = field(default_factory=Seen.nothing)

    def __post_init__(self) -> None:
        self._arrive(self.scene.few, 3)

    def step(self) -> None:
        """Ask, apply, decode.

        Raises:
            InvalidAnswer: an answer that does not pass its check.
        """
        if self.steps == self.scene.head_start:
            self._arrive(self.scene.stream, PENDING)
        self.steps += 1
        state = self.state()
        batch, ratios, _ = checked_answers(self.policy, state)
        paused = {self.running[i].request_id for i in batch.pause}
        targets = planned_tokens(state.running, ratios.running, BLOCK_TOKENS)
        for request, target in zip(self.running, targets.tolist(), strict=True):
            # Nothing of a request that pauses is restored: it needs room for all of it to resume.
            least = request.uncached if request.request_id in paused else 0
            request.uncached = max(target, least)
        admitted = self._admit(state, batch, ratios)
        batch = Batch(batch.admit[: len(admitted)], batch.pause)
        ratios = Ratios(ratios.running, ratios.admitted[: len(admitted)])
        work = step_work(state, batch, ratios)
        seconds = float(self.latency.step_seconds(work))
        self.last_step = StepReport(work, seconds, seconds)
        self.now_s += seconds
        self._decode(paused)
        self._evict()
        self._arrive(self.scene.stream, sum(r.kind is self.scene.stream for r in admitted))

    def longest_wait(self) -> tuple[float, _Request]:
        """Of the request that has waited longest for its first or next token, in seconds."""
        request = min(self.running + self.waiting, key=lambda r: r.last_token_s)
        return self.now_s - request.last_token_s, request

    def state(self) -> SystemState:
        """What the policy sees now."""
        running = self._columns(self.running)
        generated = running.tokens - running.prompt_tokens
        return make_state(
            running,
            self._columns(self.waiting),
            device_tokens=DEVICE_TOKENS,
            device_free_tokens=max(0, self._free_tokens()),
            block_tokens=BLOCK_TOKENS,
            max_running=MAX_RUNNING,
            latency=self.latency,
            now_s=self.now_s,
            last_step=self.last_step,
            lengths=OutputLengths(self.seen, {}, generated, running.priority),
        )

    def _arrive(self, kind: Kind, count: int) -> None:
        for _ in range(count):
            self.waiting.append(_Request(self.arrived, kind, self.now_s, self.now_s))
            self.arrived += 1

    def _admit(self, state: SystemState, batch: Batch, ratios: Ratios) -> list[_Request]:
        """A prefix of the requests named: as many as fit, and always one if nobody runs."""
        named = select(state.waiting, batch.admit)
        missing = planned_tokens(named, ratios.admitted, BLOCK_TOKENS).tolist()
        admitted: list[_Request] = []
        for position, uncached in zip(batch.admit, missing, strict=True):
            request = self.waiting[position]
            full = len(self.running) >= MAX_RUNNING
            if self.running and (full or request.kept - uncached > self._free_tokens()):
                break
            request.uncached, request.admitted_s = uncached, self.now_s
            self.running.append(request)
            admitted.append(request)
        self.waiting = [r for r in self.waiting if r not in admitted]
        return admitted

    def _decode(self, paused: set[int]) -> None:
        for request in self.running:
            if request.request_id not in paused:
                request.output += 1
                request.last_token_s = self.now_s
        for request in self.running:
            if request.output == request.output_tokens:
                self.policy.ended(EndedRequest(request.request_id, request.output, aborted=False))
                self.seen = self.seen.and_one(request.output, cut_off=False)
        self.running = [r for r in self.running if r.output < r.output_tokens]

    def _evict(self) -> None:
        """What pressure takes beyond the targets: blocks of the request that keeps most."""
        while self._free_tokens() < 0:
            max(self.running, key=lambda r: r.kept).uncached += BLOCK_TOKENS

    def _free_tokens(self) -> int:
        return DEVICE_TOKENS - sum(-(-r.kept // BLOCK_TOKENS) * BLOCK_TOKENS for r in self.running)

    def _columns(self, those: list[_Request]) -> Requests:
        return requests(
            [r.tokens for r in those],
            request_id=[r.request_id for r in those],
            prompt_tokens=[r.kind.prompt_tokens for r in those],
            max_new_tokens=[r.output_tokens for r in those],
            uncached_tokens=[r.uncached for r in those],
            arrival_s=[r.arrival_s for r in those],
            waited_s=[self.now_s - r.last_token_s for r in those],
            priority=[r.kind.priority for r in those],
            tpot_slo_s=[r.kind.tpot_slo_s for r in those],
            tpot_s=[
                (r.last_token_s - r.admitted_s) / (r.output - 1) if r.output > 1 else np.nan
                for r in those
            ],
        )
