"""Lives a life: SGLang's loop turns, and before each turn, events up to the next `Step` happen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    SetInternalStateReq,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel

from ellm_sgl.engine import Controller, Iteration, ServerLimits, StepLog
from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel
from ellm_sgl.memory import Outcome, PageTable, PromptRoom
from ellm_sgl.memory.step_room import Activations
from ellm_sgl.policies import Policy
from ellm_sgl.policies.baselines.whole_requests import WholeRequests
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.fixed_ratio import FixedRatio
from ellm_sgl.sglang import kv_store
from ellm_sgl.sglang.kv_store import StoredPrefixes
from ellm_sgl.sglang.scheduler import EllmScheduler
from ellm_sgl.sglang.state import DEVICE_TOKENS
from ellm_sgl.store import BlockStore, StoreFolder, store
from ellm_sgl.store.records import RECORD_BYTES
from tests.memory.fake_arena import FakeArena
from tests.simulation import accounting, events
from tests.simulation.clock import Clock
from tests.simulation.configuration import Configuration
from tests.simulation.exercised import Exercised
from tests.simulation.plane import Plane
from tests.simulation.policy import Scripted
from tests.simulation.scheduler import SimulatedScheduler
from tests.simulation.stamps import POISON, token_of

SHORT_LOOKS = 6
"""So many looks at memory in a row find all of it taken, of three times as many."""
MOST_TURNS = 600
"""Turns after the last event in which all requests must have ended."""


class Stuck(AssertionError):  # noqa: N818 (what it is, not what it does)
    """Requests wait for ever."""


class RanksDiffer(AssertionError):  # noqa: N818
    """Two ranks have come to different tables."""


class Agreement:
    """What rank 0 broadcasts, and what its tables are after each turn; rank 1 lives afterwards."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.tables: list[bytes] = []


class Life:
    """One rank's."""

    def __init__(
        self,
        configuration: Configuration,
        story: Sequence[events.Event],
        rank: int,
        agreed: Agreement,
        host_path: Path | None = None,
        other: Plane | None = None,
        store_path: Path | None = None,
    ) -> None:
        self.configuration = configuration
        self._other = other
        """The rank's whose life came first."""
        self.totals: Counter[str] = Counter()
        self._story = iter(story)
        self._rank, self._agreed = rank, agreed
        self._turn = self._heard = 0
        self._turns_left = MOST_TURNS
        self._ended = False
        self._followers: list[tuple[str, list[Any]]] = []
        """Samples that arrive once their prompt has been computed."""
        self.clock = Clock((0.0010, 0.0017)[rank])
        with get_parallel().override(tp_rank=rank, tp_size=configuration.ranks):
            self.plane = Plane(configuration, host_path)
        self.scheduler = SimulatedScheduler(self.plane, self._receive, rank)
        self.scripted = Scripted()
        self._start_loop()
        if store_path is not None:
            self._open_store(store_path)
        accounting.watch_matches(self.plane)
        accounting.watch_room(self.plane)
        self._exercised = Exercised(self.totals, self.plane, self.scheduler)
        self.scheduler.observer = self._exercised

    def live(self) -> None:
        """To the end, when all memory is free again."""
        with ExitStack() as patches:
            patches.enter_context(self.clock.running())
            patches.enter_context(self.plane.living())
            patches.enter_context(patch.object(ScheduleBatch, "prepare_for_extend", self._extend))
            patches.enter_context(patch.object(PromptRoom, "of", self._prompt_room))
            patches.enter_context(patch("sglang.srt.utils.broadcast_pyobj", self._broadcast))
            patches.enter_context(patch("torch.distributed.all_reduce", self._least))
            # A block in each turn.
            patches.enter_context(patch.object(kv_store, "BESIDE_A_STEP", 1))
            block_bytes = self.plane.pool.unit_bytes * self.plane.table.shape.num_groups
            patches.enter_context(patch.object(store, "QUEUED_BYTES", 2 * block_bytes))
            if self.configuration.overlap:
                self.scheduler.event_loop_overlap()
            else:
                self.scheduler.event_loop_normal()
        self._exercised.end()

    @property
    def _extend(self) -> Callable[[ScheduleBatch], None]:
        """`ScheduleBatch.prepare_for_extend`, watched."""
        prepare = ScheduleBatch.prepare_for_extend

        def watched(batch: ScheduleBatch) -> None:
            rows = {req.req_pool_idx for req in self.scheduler.deciding.reqs if req.kv is not None}
            accounting.prepare_prompts(self.plane, sorted(rows), lambda: prepare(batch))

        return watched

    @property
    def _prompt_room(self) -> Callable[..., PromptRoom]:
        """`PromptRoom.of`, watched."""
        of = PromptRoom.of

        def watched(table: PageTable, decoding: int, reclaimable: int, *step: Any) -> PromptRoom:
            accounting.check_room(self.plane, reclaimable)
            return of(table, decoding, reclaimable, *step)

        return watched

    def _start_loop(self) -> None:
        """As `start.start_loop`, on a machine that nobody measured."""
        model = ModelShape(self.configuration.layers, 8, 1, 1, 1, 16, 64, 8, 8)
        unit = self.plane.pool.unit_bytes
        hardware = HardwareProfile("made up", 1e6, 1e6, 1000.0 * unit, 1e-4, 1e-3, 1e-4, 1e6)
        limits = ServerLimits(
            model=model,
            hardware=hardware,
            max_running=self.configuration.max_running,
            tpot_slo_s=0.1,
            max_restored_tokens=self.plane.elastic.max_restored_tokens,
            host_scaling=self.configuration.host_scaling,
        )
        steps = StepLog(RooflineLatencyModel(model, hardware), self.clock.perf_counter)
        loop = Controller(self._policy(), math.inf, steps, limits)
        self.plane.context.hardware = hardware
        memory = self.plane.context.memory
        memory.for_growth = lambda: math.inf  # type: ignore[method-assign]
        if (rows := self.configuration.step_rows) is not None:
            self.plane.elastic.room.activations = Activations(row_bytes=1.0)
            self.plane.elastic.room.chunk_rows, looks = rows // 3, itertools.count()

            def left() -> int:
                """In place of the machine's, which differs from run to run: now and then others
                take all of it. Each rank finds its own, and rank 0's counts."""
                taken = next(looks) // SHORT_LOOKS % 3 == 1
                return (0 if taken else rows) + 7 * self._rank

            # A stand-in for one method of the real `StepMemory`.
            memory.left = left  # type: ignore[method-assign]
        iteration = Iteration(
            loop, self.plane.elastic, self.plane.pool.unit_bytes, self.clock.monotonic
        )
        self.plane.context.iteration = iteration
        self.plane.context.scheduler = self._ours = EllmScheduler(
            iteration, self.scheduler, self.plane.committer.submit
        )

    def _open_store(self, path: Path) -> None:
        """As `fingerprint.open_prefixes`; what is written reaches the disk late, too."""
        plane, blocks = self.plane, self.configuration.store_blocks
        nbytes = plane.pool.unit_bytes * plane.table.shape.num_groups
        folder = StoreFolder(path, blocks * (nbytes + RECORD_BYTES))

        def opened() -> BlockStore:
            return BlockStore(folder, "0" * 32, nbytes, plane.writer.submit)

        plane.context.stored = StoredPrefixes(
            opened, plane.elastic, plane.pool, plane.tree, self._ours.least_of_ranks
        )

    def _policy(self) -> Policy:
        made: dict[str, Callable[[], Policy]] = {
            "scripted": lambda: self.scripted,
            "fcfs": Fcfs,
            "swap": WholeRequests,
            "fixed-ratio": lambda: FixedRatio(ratio=0.4),
        }
        return made[self.configuration.policy]()

    # -- ranks ------------------------------------------------------------------------------

    def _broadcast(self, data: list[Any], rank: int, *_: Any, **__: Any) -> list[Any]:
        if self._rank == 0:
            self._agreed.said.append(data)
            return data
        if self._heard == len(self._agreed.said):
            raise RanksDiffer("rank 1 waits for a broadcast that rank 0 has not sent")
        self._heard += 1
        return list(self._agreed.said[self._heard - 1])

    def _least(self, numbers: torch.Tensor, *_: Any, **__: Any) -> None:
        """Rank 1 is never the slower one."""
        numbers.copy_(torch.tensor(self._broadcast(numbers.tolist(), 0)))

    def _compare_ranks(self) -> None:
        if self.configuration.ranks == 1:
            return
        table = accounting.digest(self.plane)
        if self._rank == 0:
            self._agreed.tables.append(table)
        elif self._agreed.tables[self._turn] != table:
            raise RanksDiffer(f"after turn {self._turn} the ranks' tables differ")
        self._turn += 1

    # -- turns ------------------------------------------------------------------------------

    def _receive(self) -> list[Any]:
        """What is sent to the scheduler before its next turn."""
        accounting.check(self.plane, self.scheduler)
        self._compare_ranks()
        if self._other is not None and self._other.host_pool is not None:
            self._other.host_pool.buffer.fill_(POISON)  # it is the other's to write at any time
        self._exercised.turn()
        self.plane.committer.pass_time()
        self.plane.writer.pass_time()
        requests = self._requests()
        for request in requests:
            self._exercised.request(request)
        return requests

    def _requests(self) -> list[Any]:
        requests = self._waited_for()
        for event in self._story:
            if isinstance(event, events.Step):
                self.scripted.step = event
                self._hurry(event.patience)
                return requests
            requests += self._happens(event)
        self.scripted.step = events.Step()
        return requests + self._come_to_an_end(bool(requests))

    def _come_to_an_end(self, busy: bool) -> list[Any]:
        if self.scheduler._engine_paused:
            return [ContinueGenerationReqInput()]
        resizing = self._ours.resizer.outcome is Outcome.UNDER_WAY
        if busy or self._followers or resizing or not self.scheduler.is_fully_idle():
            self._turns_left -= 1
            if self._turns_left == 0:
                raise Stuck(f"requests {self._unfinished()} have not ended, or {resizing=}")
            return []
        if not self._ended:
            self._ended = True
            return [FlushCacheReqInput()]
        if self.plane.device is not None:
            self.plane.device.synchronize()
        accounting.check_empty(self.plane)
        self.scheduler.gracefully_exit = True
        return []

    def _hurry(self, patience: int) -> None:
        """Let transfers wait so long, and what commits memory, which nobody waits for, less."""
        self.plane.worker.patience = patience
        self.plane.writer.patience = min(patience, events.BETWEEN)
        self.plane.committer.patience = 0 if self._rank else min(patience, events.BETWEEN)
        if self.plane.device is not None:
            self.plane.device.hurries_copies = patience < events.LATE

    def _unfinished(self) -> list[str]:
        return [rid for rid, req in self.scheduler.reqs.items() if not req.finished()]

    def _waited_for(self) -> list[Any]:
        """Samples whose prompt has been computed (TokenizerManager._handle_batch_request)."""
        arriving: list[Any] = []
        for rid, samples in list(self._followers):
            if self.scheduler.reqs[rid].finished():
                self._followers.remove((rid, samples))
                arriving += samples
        return arriving

    # -- events -----------------------------------------------------------------------------

    def _happens(self, event: events.Event) -> list[Any]:
        match event:
            case events.Arrive():
                return self._arrive(event)
            case events.Stop(name):
                if transcript := self.scheduler.transcripts.get(rid_of(name)):
                    transcript.stops = True
                    self.totals["answers stopped"] += 1
                return []
            case events.Abort(None):
                self._followers.clear()
                return [AbortReq(abort_all=True)]
            case events.Abort(name):
                rid = rid_of(name)
                self._followers = [f for f in self._followers if not f[0].startswith(rid)]
                return [AbortReq(rid=rid)]
            case events.Flush():
                return [FlushCacheReqInput()]
            case events.Pause(mode):
                return [PauseGenerationReqInput(mode=mode)]
            case events.Resume():
                return [ContinueGenerationReqInput()]
            case events.Resize(blocks, room):
                blocks = min(max(blocks, 1), self.configuration.most_blocks)
                if isinstance(arena := self.plane.arena, FakeArena):
                    room *= self.plane.table.shape.num_groups
                    arena.room = self.plane.pool.bytes_behind(room)
                tokens = blocks * self.configuration.block_tokens
                return [SetInternalStateReq(server_args={DEVICE_TOKENS: tokens})]
            case events.ClockJump(seconds):
                self.clock.jump(seconds)
            case events.PolicyFails(how):
                self.scripted.failure = how
        return []

    def _arrive(self, event: events.Arrive) -> list[Any]:
        names = range(event.name, event.name + event.n)
        if any(rid_of(name) in self.scheduler.reqs for name in names):
            return []
        prompt = self._prompt(event)
        make = self.scheduler.request
        samples = [make(rid_of(name), prompt, event.output, name, name) for name in names]
        if event.n == 1:
            return samples
        self.totals["samples of one prompt"] += event.n
        first = make(f"{rid_of(event.name)}first", prompt, 0, event.name, 0)
        self._followers.append((first.rid, samples))
        return [first]

    def _prompt(self, event: events.Arrive) -> list[int]:
        before = self.scheduler.reqs.get(rid_of(event.follows))
        if before is not None:
            begins = [*before.origin_input_ids, *before.output_ids]
        else:
            begins = [token_of("family", event.family, i) for i in range(event.shared)]
        length = min(max(event.tokens, 1), self.configuration.context * 3 // 4)
        begins = begins[: length - 1]
        return begins + [token_of("request", event.name, i) for i in range(length - len(begins))]


def rid_of(name: int | None) -> str:
    return f"r{name}."


def live(configuration: Configuration, story: Sequence[events.Event]) -> Counter[str]:
    """Live a life on every rank; returns what it came by.

    Raises:
        AssertionError, IntegrityError or whatever else is wrong.
    """
    agreed = Agreement()
    totals: Counter[str] = Counter()
    if configuration.ranks == 1 and configuration.store_blocks == 0:
        life = Life(configuration, story, 0, agreed)
        life.live()
        return life.totals
    if configuration.ranks == 1:
        with TemporaryDirectory(dir="/dev/shm") as folder:
            life = Life(configuration, story, 0, agreed, store_path=Path(folder))
            life.live()
        return life.totals
    other: Plane | None = None
    with TemporaryDirectory() as folder:  # a host tier of one name, as ranks are given it
        for rank in range(configuration.ranks):
            life = Life(configuration, story, rank, agreed, Path(folder) / "tier", other)
            life.live()
            totals += life.totals
            other = life.plane
    return totals
