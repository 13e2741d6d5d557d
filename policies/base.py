"""What a policy sees and what it answers.

The control loop builds a `SystemState` and asks three questions in turn: `batch` (who runs),
`ratio` (how much of each stays cached), `split` (how the processor is shared). `Policy` says when.
All answers are checked before they are applied; see `ellm_sgl.policies.checks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.latency import NO_WORK, HardwareProfile, LatencyModel, ModelShape, StepWork
from ellm_sgl.policies.lengths import OutputLengths

ALL_THREADS = 1024
"""T, of which δ recompute."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in columns: entry i of every array is request i. The arrays are read-only."""

    request_id: IntArray
    """Numbers a request for as long as the server knows it; grows with arrival."""
    tokens: IntArray
    """s_i: tokens of prompt and output so far; their KV is what has to be kept or restored."""
    prompt_tokens: IntArray
    """Tokens of the prompt."""
    max_new_tokens: IntArray
    """Upper bound of the output, in tokens."""
    shared_tokens: IntArray
    """Tokens in blocks that other requests use too; these stay cached."""
    uncached_tokens: IntArray
    """Tokens whose KV is missing now, so that a step has to restore it. 0 while waiting."""
    uncached_on_host: IntArray
    """Those of `uncached_tokens` that the host has and a step can fetch; the KV of the others is
    lost, and computed again. 0 while waiting, and without a host tier."""
    arrival_s: FloatArray
    """When the request arrived, in seconds of the server's clock (see `SystemState.now_s`)."""
    waited_s: FloatArray
    """Running: seconds since its last token. Waiting: seconds since it began to wait."""
    priority: IntArray
    """Larger is more urgent, whatever SGLang's own order of priorities is; 0 if none was given."""
    tpot_slo_s: FloatArray
    """SLO on the average time per output token, in seconds; inf if none was given."""
    ttft_slo_s: FloatArray
    """SLO on the time to first token, in seconds; inf if none was given."""
    tpot_s: FloatArray
    """Measured average time per output token so far, in seconds; nan before the second token."""

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(frozen=True)
class Growth:
    """What the device pool could come to hold beside what it does, by itself as requests need it
    (servers that share a budget, and those that give memory back while they are idle)."""

    tokens: int = 0
    """KV tokens at once: of memory that nobody has,"""
    with_idle_tokens: int = 0
    """and as soon as other servers have given back what they have and do not need; no fewer."""
    seconds_per_token: float = 0.0
    """What growing costs, as measured when it last grew: memory is committed beside the steps. 0
    before."""


NO_GROWTH = Growth()


@dataclass(frozen=True)
class MemoryState:
    """Memory by tier. Token counts are over all layers: one token is its KV in every layer."""

    block_tokens: int
    """Tokens per block; ratios are applied in whole blocks."""
    device_tokens: int
    """KV tokens that the device pool holds."""
    device_free_tokens: int
    """KV tokens that could be placed on the device now, cached prefixes nobody uses included."""
    host_tokens: int
    """KV tokens that the host tier holds; 0 without one."""
    host_free_tokens: int
    """KV tokens free in the host tier."""
    max_restored_tokens: int
    """Most tokens that one step can recompute. Σ n_i of those that take part has to stay within it,
    also where the host has copies: what there is no room to fetch is recomputed."""
    staging_overhead: float
    """M_o per restored token: device memory a step needs to restore one token, in KV tokens."""
    growth: Growth = NO_GROWTH
    """What it could become."""


@dataclass(frozen=True)
class StepReport:
    """One measured step."""

    work: StepWork
    seconds: float
    """From its start to the start of the next step."""
    predicted_s: float
    """What the latency model had predicted, in seconds."""
    swap_stall_s: float = 0.0
    """Seconds that the step waited for transfers from host memory."""
    ended_s: float = 0.0
    """When the next step started, or none did, in seconds (monotonic)."""

    @property
    def computing_s(self) -> float:
        """Seconds without those that the step waited for transfers."""
        return self.seconds - self.swap_stall_s


@dataclass(frozen=True, eq=False)
class SystemState:
    """One iteration of the scheduler, as a policy sees it. Read-only."""

    now_s: float
    """The server's clock, in seconds (monotonic)."""
    busy_s: float
    """For how much of its time the server had something to do and went on with it, in seconds; of
    the time that it was idle or paused nothing counts."""
    running: Requests
    """Requests that decode; by `request_id`, that is, in the order in which they arrived."""
    waiting: Requests
    """Requests that wait to be admitted; in the order in which SGLang would take them."""
    prefilling: Requests
    """Requests whose prompts are computed in chunks, at most one on SGLang: they decode next. Of
    these `uncached_tokens` will lack KV then, at the ratio that they were admitted at; what the
    others have and will take is neither free nor part of `MemoryState.device_tokens`. `waited_s` is
    since they began to wait."""
    max_running: int
    """B: most requests that may run at once."""
    memory: MemoryState
    model: ModelShape
    """The model served."""
    hardware: HardwareProfile
    """The machine that serves it."""
    latency: LatencyModel
    """Predicts the time of a step of given work. Of what it restores, it takes what the host has or
    could still take to be fetched, and the rest to be recomputed. A policy may call `step_seconds`
    and nothing else."""
    tpot_slo_s: float
    """The server's SLO on the time per output token, in seconds; inf if none was set."""
    last_step: StepReport | None
    """The last measured step; None before the first."""
    pace: float
    """By how much decode steps have of late taken longer than the latency model predicts: the
    0.8 quantile of means over 64 steps. 1 at first."""
    lengths: OutputLengths
    """How long answers get, by what the server has seen."""
    prefill_left: StepWork = NO_WORK
    """What is left to compute of the prompts under way: those who decode wait for it."""


@dataclass(frozen=True)
class Batch:
    """Answer to the batch question: who runs."""

    admit: tuple[int, ...]
    """Positions in `state.waiting` of the requests to admit, in the order to admit them. The
    server admits a prefix of these: fewer, if one iteration has no room for all."""
    pause: tuple[int, ...] = ()
    """Positions in `state.running` of the requests that pause for this step. Their KV stays,
    but for what their ratio evicts: a step restores nothing of theirs."""


@dataclass(frozen=True, eq=False)
class Ratios:
    """Answer to the ratio question: the uncached ratio r of each request, in [0, 1).

    Targets: the block being filled and shared blocks stay cached, ratios are rounded down to
    whole blocks, and pressure may push a request above its target until room returns.
    """

    running: FloatArray
    """One per entry of `state.running`."""
    admitted: FloatArray
    """One per entry of `batch.admit`: what each will come to. The server admits them in their order
    while they fit at these ratios, with all the output that they may have: of each, a share
    1 - (1 - M_o) r counts. Those that run count as coming to the least of the ratios of those
    admitted with them, or to their own targets where these are higher."""


@dataclass(frozen=True)
class WorkSplit:
    """Answer to the split question: how one step divides layers and processor."""

    swap_layers: int
    """l1 ≤ 3, and"""
    recompute_layers: int
    """l2 ≤ 2: of l1 + l2 layers, l1 are fetched from host memory and l2 are recomputed."""
    delta: int
    """δ: of T = 1,024 threads (or the same share of cores), those given to recomputation;
    a multiple of 32, at least 32 and at most 992."""

    @property
    def recompute_share(self) -> float:
        """φ = l2 / (l1 + l2): the share of the layers that are recomputed, 0..1."""
        return self.recompute_layers / (self.swap_layers + self.recompute_layers)

    @property
    def delta_share(self) -> float:
        """δ as a share of the processor, 0..1."""
        return self.delta / ALL_THREADS


@dataclass(frozen=True)
class EndedRequest:
    """A request that the server knows no longer."""

    request_id: int
    """As in `Requests.request_id`, if the policy has seen it at all."""
    output_tokens: int
    """Tokens generated."""
    aborted: bool
    """The client, or the server, gave it up; else it ended by itself or at its bound."""


MOST_ENDED = 65_536
"""Ended requests that wait to be told to a policy."""


class Policy(ABC):
    """Decides who runs, how much of each request stays cached, and how a step is divided.

    Asked once per iteration of the scheduler in which somebody runs or waits, before it is known
    whether the iteration's step computes prompts or decodes: `batch` before `ratio` before `split`.
    Where somebody may be admitted, running requests come to their ratios first, so that prompts
    find room; otherwise in the step that decodes. Pauses are for steps that decode. After a step of
    prompts the next iteration asks anew. The policy is not asked while a decision stands
    (`idle_without_pressure`). With tensor parallelism only rank 0 asks; the others get its answer.

    All calls come from one thread. A policy may remember things between them, but must not change
    the state it is given. It has `--ellm-policy-budget-ms` (5 by default) for all three answers.
    An exception or an answer that fails its check is replaced for that iteration by "keep all
    cached, admit as SGLang does", and counted. So is a late answer, but that for up to a second
    what the policy said last stands, nobody being admitted; of a policy that promises never to wait
    (`never_waits`) a late answer is counted, and used.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A promise is of those methods alone that it was made for."""
        super().__init_subclass__(**kwargs)
        # Mypy forbids assigning to methods; that the inherited one is replaced is the point.
        if not _promised(cls, "idle_without_pressure", {"batch", "ratio"}):
            cls.idle_without_pressure = Policy.idle_without_pressure  # type: ignore[method-assign]
        if not _promised(cls, "never_waits", {"batch", "ratio", "split", "ended", "close"}):
            cls.never_waits = Policy.never_waits  # type: ignore[method-assign]

    def idle_without_pressure(self) -> bool:
        """Promise that once all run and all is cached it stays so, while nobody waits and there is
        room for a block more of every request. The server then does not ask before such a time
        ends: on a CPU, 5 % of a short step. A subclass that answers `batch` or `ratio` itself
        promises nothing unless it says so."""
        return False

    def never_waits(self) -> bool:
        """Promise that no method waits for anything: another thread, a file, the network. The
        server then asks on its own thread, which spares a hand-over that takes milliseconds on a
        busy CPU host; the budget is the same, but a call that hangs hangs the server. Any other
        policy is asked on a thread of its own, and left behind when it is late. A subclass that
        has one of these methods of its own promises nothing unless it says so."""
        return False

    def ended(self, request: EndedRequest) -> None:  # noqa: B027 (does nothing by default)
        """A request has ended, for what a policy remembers of it. Called once for each, before the
        next `batch`, on the same thread and within the same budget; an exception is counted like
        one in an answer, and the questions are asked all the same. Requests that ended while other
        policies were asked are not told of, and of those that end while a call of this one hangs
        only the latest `MOST_ENDED`."""

    def close(self) -> None:  # noqa: B027 (does nothing by default)
        """Another policy takes its place, or its simulation is over: let go of files and threads.
        The last call, on the same thread; nobody waits for it, and not made where the server's
        process ends."""

    @abstractmethod
    def batch(self, state: SystemState) -> Batch:
        """Which waiting requests are admitted, and which running requests pause for this step."""

    @abstractmethod
    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        """The uncached ratio of every running and every admitted request."""

    @abstractmethod
    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        """(l1, l2) and δ for a step of work `plan`, whose recomputed rows come from `ratio`."""


def _promised(cls: type, promise: str, methods: set[str]) -> bool:
    """Whether nothing that goes before the class which promises brings one of these methods: the
    policy's own, or a class mixed in."""
    for each in cls.__mro__:
        if promise in vars(each):
            return True
        if methods & vars(each).keys():
            return False
    return False
