"""Faults to plant in the product: the simulation has to find each of them.

Over 400 lines: one table.
"""

from __future__ import annotations

import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A function of the product with a mistake in it."""

    name: str
    """What goes wrong."""
    function: str
    """As "module:name" or "module:Class.name"."""
    old: str
    """Part of its source,"""
    new: str
    """and what stands there instead."""
    first: int = 0
    """The life to begin with; those before it, which do not find it, come last."""


_ELASTIC = "ellm_sgl.memory.elastic:ElasticMemory"
_EVICTOR = "ellm_sgl.memory.eviction:Evictor"
_TABLE = "ellm_sgl.memory.page_table:PageTable"
_HOST = "ellm_sgl.memory.host_tier:HostTier"
_RESTORATION = "ellm_sgl.step.restoration"
_STREAMER = "ellm_sgl.step.transfer.python:Streamer"
_DEVICE = "ellm_sgl.step.transfer.cuda:DeviceStreamer"
_GRAPH = "ellm_sgl.step.transfer.graph:GraphFetch"
_HIDDEN = "ellm_sgl.step.hidden"
_ITERATION = "ellm_sgl.engine.iteration:Iteration"
_TREE = "ellm_sgl.sglang.prefix_cache"
_PAUSED = "ellm_sgl.sglang.paused:PausedRequests"
_RESIZER = "ellm_sgl.memory.resize:Resizer"

_STORED = "ellm_sgl.sglang.kv_store:StoredPrefixes"
_ROOM = "ellm_sgl.memory.prompt_room:PromptRoom"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "prompts take what those who decode have cached",
        f"{_ELASTIC}.place_new",
        "if evict:",
        "if True:",
    ),
    Fault(
        "prefixes that only the host has count as room on the device",
        f"{_TABLE}.idle_units",
        "max(units - self.idle_missing_units(), 0)",
        "units",
    ),
    Fault(
        "what only the host has keeps units before it from making way",
        f"{_TREE}:EllmRadixCache.drop_idle",
        "len(parent.children) == staying[parent]",
        "len(parent.children) == 0",
    ),
    Fault(
        "a prompt that finds no room for a block goes on for ever without computing any",
        f"{_ROOM}.of",
        "if decoding:",
        "if True:",
    ),
    Fault(
        "a prompt's blocks are evicted before any step has computed them",
        f"{_EVICTOR}.evictable",
        " & table.computed_in_full(blocks)",
        "",
        first=164,
    ),
    Fault(
        "ranks map one file for their host tiers",
        "ellm_sgl.memory.pool:_buffer",
        "torch.frombuffer(map_file(path, count * dtype.itemsize), dtype=dtype)",
        "torch.from_file(str(path.with_suffix('')), shared=True, size=count, dtype=dtype)",
    ),
    Fault(
        "each rank fetches ahead as much as its own clock allows",
        f"{_ITERATION}.plan_decode",
        "self.in_force.fetch_ahead_s",
        "self.controller.steps.last.seconds / 2",
        first=326,
    ),
    Fault(
        "evicted units are copied to each other's places on the host",
        f"{_EVICTOR}._keep",
        "self._save(table.units[pairs],",
        "self._save(table.units[pairs][::-1],",
    ),
    Fault(
        "a block evicted in part is counted as evicted as a whole",
        f"{_TABLE}.evict",
        "self.missing_units += len(held)",
        "self.missing_units += self.shape.num_groups",
    ),
    Fault(
        "adopted units stay with the block that gave them",
        f"{_TABLE}.adopt",
        "self._units[source, gaps] = NONE",
        "pass",
    ),
    Fault(
        "adoption replaces units that the tree has not lost",
        f"{_TABLE}.adopt",
        "gaps = (self.units[destination] == NONE) & (self.units[source] != NONE)",
        "gaps = self.units[source] != NONE",
        first=1128,
    ),
    Fault(
        "a request's blocks gain no reference when it is mapped",
        f"{_TABLE}.map",
        "self._refs[ids] += 1",
        "pass",
    ),
    Fault(
        "copies outlive the block that they are of",
        f"{_HOST}.drop",
        "self._units[blocks] = NONE",
        "pass",
    ),
    Fault(
        "rows go only through the lowest of the groups that lack a block",
        f"{_RESTORATION}:_depth",
        "highest = recompute.shape[1] - np.argmax(recompute[:, ::-1], axis=1)",
        "highest = 1 + np.argmax(recompute, axis=1)",
    ),
    Fault(
        "all groups are fetched to one slot of the ring",
        f"{_RESTORATION}:_ring",
        "sets[group % slots]",
        "sets[0]",
    ),
    Fault(
        "a group more is fetched at once than there are slots",
        f"{_STREAMER}.restart",
        "range(self._slots)",
        "range(self._slots + 1)",
    ),
    Fault(
        "layers do not wait for their units",
        f"{_STREAMER}.wait",
        "self._arriving.pop(group).result()",
        "self._arriving.pop(group)",
    ),
    Fault(
        "without a worker, what is to be fetched ahead is never copied",
        f"{_STREAMER}._wait_ahead",
        "self._copy(self._ahead)",
        "pass",
    ),
    Fault(
        "units are given out beyond a lowered limit",
        f"{_TABLE}.place",
        "max(self.free_units, 0)",
        "len(self._free_units)",
    ),
    Fault(
        "units that move leave their KV behind",
        f"{_RESIZER}._move_tail",
        "self._copy(buffer, to.long(), buffer, of.long())",
        "pass",
    ),
    Fault(
        "units that move take each other's KV",
        f"{_RESIZER}._move_tail",
        "of.long()",
        "of.long().flip(0)",
    ),
    Fault(
        "units that have moved are in use where they were, too",
        f"{_TABLE}.relocate",
        "self._free_units.give(sources)",
        "pass",
    ),
    Fault(
        "memory is given back though units beyond the limit are still in use",
        f"{_RESIZER}._give_back_tail",
        "max(table.unit_limit, table.highest_unit, committed - chunk)",
        "max(table.unit_limit, committed - chunk)",
    ),
    Fault(
        "memory that has been given back counts as the pool's",
        f"{_RESIZER}._give_back_tail",
        "table.decommit_units(frontier)",
        "pass",
    ),
    Fault(
        "memory that another rank did not get in time stays with this one",
        f"{_RESIZER}._publish",
        "self._pool.decommit(units, growth.committed)",
        "pass",
    ),
    Fault(
        "units are used before they have memory",
        f"{_RESIZER}._publish",
        "table.commit_units(units)",
        "table.commit_units(self.wanted_units)",
    ),
    Fault(
        "each rank uses what it has committed itself",
        f"{_RESIZER}._publish",
        "self._agree([growth.committed, mine, growth.most])",
        "[growth.committed, mine, growth.most]",
    ),
    Fault(
        "a growth for which there is no memory never ends",
        f"{_RESIZER}._publish",
        "self._came_to(Outcome.CEILING)",
        "pass",
    ),
    Fault(
        "high units are given out while low ones are free",
        "ellm_sgl.memory.ids:FreeList.take",
        """found[:count] + self._first).astype(np.int32)
        self._free[ids] = False
        self._count -= count
        self._first = int(ids[-1]) + 1
""",
        """found[-count:] + self._first).astype(np.int32)
        self._free[ids] = False
        self._count -= count
""",
    ),
    Fault(
        "on a device, units are copied to the host before the step that fills them has ended",
        f"{_DEVICE}.save",
        "self._stream.wait_event(self._stepped)",
        "pass",
    ),
    Fault(
        "on a device, a step writes to units that are still being copied to the host",
        f"{_DEVICE}.running",
        "computing.wait_stream(self._stream)",
        "pass",
    ),
    Fault(
        "on a device, units are fetched to where the step before still reads",
        f"{_DEVICE}.running",
        "self._stream.wait_stream(computing)",
        "pass",
    ),
    Fault(
        "on a device, a slot of the ring is written to while its group still computes",
        f"{_DEVICE}.done",
        "self._stream.wait_event(left)",
        "pass",
    ),
    Fault(
        "on a device, layers do not wait for their units",
        f"{_DEVICE}.wait",
        "self._api.current_stream().wait_event(arrived)",
        "pass",
    ),
    Fault(
        "in a graph, units are copied before the step that the list is of",
        f"{_GRAPH}.wait",
        "self._stream.wait_stream(computing)",
        "pass",
        first=48,
    ),
    Fault(
        "in a graph, layers do not wait for their units",
        f"{_GRAPH}.wait",
        "computing.wait_event(self._arrived[group])",
        "pass",
    ),
    Fault(
        "in a graph, a slot is written to while its group still computes",
        f"{_GRAPH}.done",
        "self._stream.wait_event(self._left[group])",
        "pass",
        first=92,
    ),
    Fault(
        "a graph fetches once more what the step before did",
        f"{_GRAPH}.load",
        "if not transfers and self._empty:",
        "if not transfers:",
        first=81,
    ),
    Fault(
        "fetched units are read from nowhere",
        "ellm_sgl.step.plan:_Rows.of",
        "np.where(units == NONE, restoration.staged_units(blocks.ids), units)",
        "units",
    ),
    Fault(
        "borrowed units are not returned",
        "ellm_sgl.step.executor:Executor.execute",
        "self._table.return_units(plan.borrowed)",
        "pass",
    ),
    Fault(
        "what is placed for good counts as there already",
        "ellm_sgl.step.planner:Planner.decode",
        """            self._elastic.restore(seq_ids, missing.blocks)
""",
        """            self._elastic.restore(seq_ids, missing.blocks)
            missing = Missing.of(table, seq_ids)
""",
    ),
    Fault(
        "a policy has more recomputed than a step has room for",
        "ellm_sgl.step.planner:Planner._recompute_share",
        "return share if rows <= elastic.restorable_tokens(len(seq_ids)) else 0.0",
        "return share",
        first=215,
    ),
    Fault(
        "room to fetch to is counted that the step's own tokens take",
        f"{_ELASTIC}.fits_one_step",
        "self.table.free_units - units",
        "self.table.free_units",
        first=113,
    ),
    Fault(
        "room to fetch to is given to what is computed again",
        f"{_ELASTIC}.restore",
        "spare = self.table.free_units - staged\n",
        "spare = self.table.free_units\n",
        first=215,
    ),
    Fault(
        "each rank asks its own memory",
        "ellm_sgl.sglang.scheduler:EllmScheduler._of_rank_0",
        "return of_rank_0(self.scheduler, found)",
        "return found()",
        first=113,
    ),
    Fault(
        "hidden states are kept of blocks whose first tokens were not captured",
        f"{_HIDDEN}:plan_capture",
        "host.begin_hidden(np.unique(blocks[offsets == 0]))",
        "host.begin_hidden(np.unique(blocks))",
        first=308,
    ),
    Fault(
        "hidden states are projected as if their block began the request",
        f"{_RESTORATION}:_transfers",
        "table.starts_of(blocks)[:, None] + places",
        "0 * table.starts_of(blocks)[:, None] + places",
    ),
    Fault(
        "a match goes on beyond the first incomplete block",
        f"{_TREE}:EllmRadixCache.match_prefix",
        "if self._match_all:",
        "if True:",
    ),
    Fault(
        "what lies beyond an incomplete block is dropped though others use it",
        f"{_TREE}:EllmRadixCache._drop_beyond",
        "if below is None or below.lock_ref > 0:",
        "if below is None:",
    ),
    Fault(
        "without a tree, a request that ends stays mapped",
        "ellm_sgl.sglang.chunk_cache:EllmChunkCache.cache_finished_req",
        "context_of(self).forget_request(req)",
        "pass",
    ),
    Fault(
        "units count as committed from the start though only addresses are reserved",
        f"{_TABLE}.__init__",
        "num_units if committed is None else committed",
        "num_units",
    ),
    Fault(
        "blocks of equal tokens are the same to the store, whatever is before them",
        "ellm_sgl.store.chain:Chain.extend",
        "blake2b(last + block",
        "blake2b(block",
        first=70,
    ),
    Fault(
        "blocks read from the store are filled in the wrong order",
        f"{_STORED}._read",
        "self._table.units[placed], data",
        "self._table.units[placed[::-1]], data",
        first=123,
    ),
    Fault(
        "blocks that the tree has already stay allocated beside it",
        f"{_STORED}._insert",
        "if len(twice):",
        "if False:",
    ),
    Fault(
        "in a mixed step, who sat out the one before goes on a position too far",
        "ellm_sgl.sglang.decode_memory:place_decoded",
        "if count := running_batch.batch_size():",
        "if count := 0:",
        first=77,
    ),
    Fault(
        "paused requests do not resume",
        f"{_PAUSED}.bring_back",
        "running.merge_batch(paused)",
        "pass",
    ),
    Fault(
        "requests aborted while they were paused keep their memory",
        f"{_PAUSED}.end_aborted",
        "adapter().release(req, self.scheduler.tree_cache)",
        "pass",
    ),
)


class Misplanted(LookupError):  # noqa: N818 (what it is, not what it does)
    """The product has changed, and the fault has to be adapted."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The product has this fault, in this process.

    Raises:
        Misplanted: there is no such text, or more than one.
    """
    function: Any = inspect.unwrap(pkgutil.resolve_name(fault.function))
    function = getattr(function, "__func__", function)
    source = inspect.getsource(function)
    if (count := source.count(fault.old)) != 1:
        raise Misplanted(f"{fault.function} has {fault.old!r} {count} times: adapt the fault")
    mended = function.__code__
    faulty = textwrap.dedent(source.replace(fault.old, fault.new))
    function.__code__ = _compiled(faulty, mended)
    try:
        yield
    finally:
        function.__code__ = mended


def _compiled(source: str, like: CodeType) -> CodeType:
    """The code of a function or method, which may call `super()`."""
    inside_a_class = "class _:\n" + textwrap.indent(source, "    ")
    flags = annotations.compiler_flag
    module = compile(inside_a_class, like.co_filename, "exec", flags, dont_inherit=True)
    (body,) = (c for c in module.co_consts if isinstance(c, CodeType))
    return next(c for c in body.co_consts if isinstance(c, CodeType) and c.co_name == like.co_name)
