"""The pool's size, where it follows what requests need (`memory/sizer.py`): this server shares a
budget with others, or gives memory back while it is idle.

Rank 0 decides, on a thread of its own: an idle scheduler sleeps, and others wait for its memory.
What it decides comes to the scheduler as one of SGLang's own requests, over the socket on which all
of them come: so it wakes the scheduler, and every rank gets it in the same turn.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.budget import LedgerBusyError, LedgerError, Member, Standing, Waker
from ellm_sgl.budget.file import LedgerFile
from ellm_sgl.config import EllmConfig
from ellm_sgl.memory import Alone, Load, Outcome, PageTable, Report, Resizer, Sizer, Sizes
from ellm_sgl.memory.arena import trim_heap
from ellm_sgl.memory.shape import PoolShape
from ellm_sgl.memory.sizer import Ledger
from ellm_sgl.policies import Growth
from ellm_sgl.policies.base import NO_GROWTH

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

LOOK_S, PERIOD_S, PAUSE_S = 0.2, 0.02, 0.002
"""How often to look at the ledger where it says when it is written to, and where it does not, or
others wait for what this server has; and how much later at least, however often it is written to.
Every look takes the scheduler's thread a moment."""
OBSERVE_S = 0.2
"""How often to add up what requests need, while they decode and none waits."""
_ADDRESS = "inproc://ellm-sizing"


class Sizing:
    """One in each scheduler process; rank 0's decides.

    Args:
        settings: that say when memory goes back.
        key: of this server's own requests, which no client knows.
        sizes: of the pool.
        least_units: what it keeps, whatever others want.
        most_units: what it may have, until the operator says otherwise.
        row: of the ledger: this server's, on rank 0; what the other ranks hold it with; None where
            nothing is shared.
    """

    def __init__(
        self,
        settings: EllmConfig,
        key: str,
        sizes: Sizes,
        least_units: int,
        most_units: int,
        row: Member | LedgerFile | None,
    ) -> None:
        self.key, self.sizes, self.least_units = key, sizes, least_units
        self.most_units = most_units
        """As the operator says."""
        self.problem: str | None = None
        """Why the size changes no more."""
        self.standing: Standing | None = None
        """As last seen, on rank 0."""
        self.shares = row is not None
        """With other servers."""
        self._row, self._settings = row, settings
        self._sizer: Sizer | None = None
        self._load = Load(0, 0, 0)
        self._report = Report(0, 0, 0, under_way=False)
        self._observed_s = 0.0
        self._growth: tuple[tuple[Any, ...], Growth] | None = None
        """What it was reckoned from, and what came of it: it stands for many steps."""
        self._asked = False
        """What was asked last has not been reported on."""
        self._to_trim = False
        self._waker = row.waker() if isinstance(row, Member) else Waker(None)

    def describe(self) -> dict[str, Any] | None:
        """For `/ellm/state`, on rank 0; in bytes of all ranks. None where nothing is shared."""
        if not self.shares:
            return None
        standing = self.standing or Standing(0, 0, 0)
        return {
            "floor_bytes": self.sizes.bytes_of(self.least_units),
            "needed_bytes": 0 if self._sizer is None else self._sizer.wanted_bytes,
            "share_bytes": standing.share,
            "committed_bytes": standing.committed,
            "free_bytes": standing.free,
            "problem": self.problem,
        }

    # -- on the scheduler's thread ------------------------------------------------------------

    def start(self, scheduler: Scheduler, resizer: Resizer) -> None:
        """On rank 0, before the first turn: requests decide from now on."""
        units = resizer.wanted_units
        alone = Alone(self.sizes.bytes_of(units))
        ledger: Ledger = self._row if isinstance(self._row, Member) else alone
        self._sizer = Sizer(ledger, self.sizes, self.least_units, self._settings.idle_release_s)
        self._load = Load(units, self.most_units, units)
        self._report = Report(units, units, units, under_way=False)
        socket = scheduler.ipc_channels.recv_from_tokenizer
        socket.bind(_ADDRESS)
        sender = socket.context
        threading.Thread(target=self._run, args=(sender,), name="ellm-size", daemon=True).start()

    def observe(self, scheduler: Scheduler, resizer: Resizer, running: Sequence[Req]) -> None:
        """On rank 0, before a step: what requests need.

        Args:
            running: those that decode, and those whose prompt the last step has computed, none of
                which has finished: the scheduler's own batch may lack some, or have others still.
        """
        now, before = time.monotonic(), self._load
        if (
            now < self._observed_s + OBSERVE_S
            and before.idle_since_s is None
            and before.asked_units == resizer.wanted_units
            and running
            and not scheduler.waiting_queue
        ):
            return
        self._observed_s, idle_since = now, None
        if not (work(running) or work(scheduler.waiting_queue) or scheduler.chunked_req):
            idle_since = now if before.idle_since_s is None else before.idle_since_s
        needed = needed_units(scheduler, running, self.sizes, self.most_units)
        self._load = Load(
            needed,
            self.most_units,
            resizer.wanted_units,
            idle_since,
            resizer.used_units if self._settings.idle_keep_prefixes else 0,
            before.released,
            resizer.limit_units,
        )
        if self._sizer is not None and self._sizer.presses(before, self._load):
            self._waker.wake()

    def growth(self, resizer: Resizer, shape: PoolShape) -> Growth:
        """On rank 0: what the pool could come to hold beside what it does."""
        given = (self.problem, self.standing, self.most_units, resizer.limit_units,
                 resizer.outcome, resizer.commit_s_per_unit)  # fmt: skip
        if self._growth is None or self._growth[0] != given:
            self._growth = given, self._growth_now(resizer, shape)
        return self._growth[1]

    def wants_more(self, resizer: Resizer, shape: PoolShape) -> bool:
        """On rank 0: whether requests need more than there is, and it may be had; others have not
        heard of it yet, or leave it that share."""
        needed = self._load.needed_units
        if needed <= resizer.limit_units or resizer.outcome is Outcome.CEILING or self.problem:
            return False
        wanted = self.sizes.bytes_of(min(needed, self.most_units))
        unheard = self._sizer is not None and self._sizer.wanted_bytes < wanted
        return unheard or self.growth(resizer, shape).with_idle_tokens > 0

    def _growth_now(self, resizer: Resizer, shape: PoolShape) -> Growth:
        if self.problem is not None:  # nobody asks for it any more
            return NO_GROWTH
        at_once = with_idle = self.most_units
        if self.shares:
            standing = self.standing or Standing(0, 0, 0)
            if standing.share < standing.committed:  # others wait for what it has
                return NO_GROWTH
            reached = standing.committed + standing.free
            at_once = min(self.sizes.units_in(reached), at_once)
            with_idle = min(self.sizes.units_in(max(standing.share, reached)), with_idle)
        if resizer.outcome is Outcome.CEILING:  # the machine has no more
            return NO_GROWTH
        now, token = resizer.limit_units, shape.num_groups / shape.block_tokens
        return Growth(
            shape.tokens_in(max(at_once - now, 0)),
            shape.tokens_in(max(with_idle - now, 0)),
            resizer.commit_s_per_unit * token,
        )

    def at_once(self, resizer: Resizer) -> int:
        """On rank 0: units that may be asked for without a debit: those that have been debited, or
        the floor, which is promised, where the ledger is of no use any more."""
        if not self.shares:
            return self.sizes.most_units
        if self.problem is not None and self.standing is not None:
            had = self.sizes.units_in(self.standing.committed)
            return max(had, resizer.limit_units, self.least_units)
        coming = resizer.coming_units if resizer.outcome is Outcome.UNDER_WAY else 0
        return max(resizer.limit_units, coming)

    def released(self, away: bool, resizer: Resizer) -> None:
        """On every rank: all memory has been told to go, and to stay away, or may come back."""
        load = self._load
        self._load = dataclasses.replace(
            load,
            released=away,
            asked_units=resizer.wanted_units,
            limit_units=resizer.limit_units,
        )
        self._waker.wake()

    def told_to_come_to(self, most_units: int, resizer: Resizer) -> None:
        """On every rank: so many units are the most from now on; and the pool may have been asked
        to come to another size."""
        self.most_units = most_units
        asked = resizer.wanted_units
        limit = resizer.limit_units
        self._load = dataclasses.replace(
            self._load, asked_units=asked, most_units=most_units, limit_units=limit
        )
        self._waker.wake()

    def apply(self, ours: Any, units: int) -> None:
        """On every rank: come to so many units, unless they are negative, and report. What has been
        released stays as it is.

        Args:
            ours: the `EllmScheduler`.
        """
        resizer: Resizer = ours.resizer
        if units >= 0 and ours.released is None:
            self._to_trim |= units < resizer.limit_units
            ours.resize(min(units, self.most_units))
        (least,) = ours.least_of_ranks([-resizer.backed_units])
        self._report = Report(
            asked_units=resizer.wanted_units,
            limit_units=resizer.limit_units,
            backed_units=-least,
            under_way=resizer.outcome is Outcome.UNDER_WAY,
            ceiling=resizer.outcome is Outcome.CEILING,
        )
        # Where generation is paused nobody observes.
        self._asked = False
        self.told_to_come_to(self.most_units, resizer)
        self.trim(ours)  # last: another server may wait for the pool's memory

    def trim(self, ours: Any) -> None:
        """On every rank, once a turn: what libc keeps goes too where the pool has shrunk, as soon
        as no request waits meanwhile, not even one about the server's health.

        Args:
            ours: the `EllmScheduler`.
        """
        if self._to_trim and ours.idle():
            self._to_trim = False
            trim_heap()

    # -- on the thread that decides -------------------------------------------------------------

    def _run(self, context: Any) -> None:
        import zmq

        sender = context.socket(zmq.PUSH)
        sender.connect(_ADDRESS)
        try:
            while True:
                self._turn(sender)
                time.sleep(PAUSE_S)
                self._waker.sleep(self._pause_s())
        except (LedgerError, OSError) as error:
            self.problem = str(error)
            logger.error("eLLM budget: %s; this server keeps what it has", error)
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            logger.exception("eLLM budget: this server keeps what it has")

    def _pause_s(self) -> float:
        """Until the next look, where nobody writes to the ledger, or has anything new to say."""
        standing = self.standing or Standing(0, 0, 0)
        awaited = standing.share < standing.committed
        heard = not self.shares or self._waker.hears
        return LOOK_S if heard and not awaited else PERIOD_S

    def _turn(self, sender: Any) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq, sock_send

        assert self._sizer is not None
        if self._asked:
            return
        try:
            ask = self._sizer.tick(self._load, self._report, time.monotonic())
        except LedgerBusyError as error:
            logger.warning("eLLM budget: %s", error)
            return
        self.standing = self._sizer.standing
        if ask is not None:
            self._asked = True
            units = -1 if ask.units is None else ask.units
            sock_send(sender, SetInternalStateReq(server_args={self.key: units}))


def work(reqs: Iterable[Any]) -> list[Any]:
    """Without what SGLang asks itself when somebody asks for `/health`: that goes on all day, and
    is nobody's work."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    return [req for req in reqs if not is_health_check_generate_req(req)]


def needed_units(scheduler: Scheduler, running: Sequence[Req], sizes: Sizes, most: int) -> int:
    """Units for the KV of all requests, with what they are expected to generate: as much as
    SGLang's admission counts. At most `most`.

    Cached prefixes that nobody uses are not needed: they keep their memory while nobody else wants
    it.
    """
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    allocator = scheduler.token_to_kv_pool_allocator
    table: PageTable = allocator.ellm.table
    block = table.shape.block_tokens
    in_use = (table.num_blocks - table.free_blocks) * block
    tokens = in_use - int(scheduler.tree_cache.evictable_size())
    decoding = work(running)
    tokens = max(tokens - block * (len(running) - len(decoding)), 0)  # of whoever asks, one each
    tokens += allocator.ellm.elastic.under_way.coming * block

    def to_come(req: Any) -> int:
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return min(max(left, 0), CLIP_MAX_NEW_TOKENS)

    tokens += int(sum(map(to_come, decoding)) * scheduler.new_token_ratio_tracker.current)
    tokens += 2 * block * len(decoding)  # the last one is not full, and the next is at hand
    for req in work(scheduler.waiting_queue):
        if tokens * sizes.groups >= most * block:
            break
        tokens += len(req.origin_input_ids) + len(req.output_ids) + to_come(req) + 2 * block
    return min(table.shape.blocks_for(tokens) * sizes.groups, most)
