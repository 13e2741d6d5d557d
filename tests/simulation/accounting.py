"""Where every unit, block and row is, after every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ellm_sgl.memory.shape import NONE
from ellm_sgl.sglang.prefix_cache import EllmRadixCache
from ellm_sgl.sglang.scheduler import scheduler_of
from ellm_sgl.step import StepPlan
from tests.memory.fake_arena import FakeArena
from tests.simulation.plane import Plane
from tests.simulation.scheduler import SimulatedScheduler


class Unaccounted(AssertionError):  # noqa: N818 (what it is, not what it does)
    """Something is lost, or owned by two."""


def check(plane: Plane, scheduler: SimulatedScheduler) -> None:
    """All that must hold between two events.

    Raises:
        Unaccounted, IntegrityError: saying what does not.
    """
    table = plane.table
    table.check_integrity()
    if (owned := int(np.count_nonzero(table.units[1:] != NONE))) != table.used_units:
        raise Unaccounted(f"{table.used_units} units in use, but blocks own {owned}")
    if table.used_units > table.unit_limit:
        raise Unaccounted(f"{table.used_units} units in use, {table.unit_limit} allowed")
    if isinstance(arena := plane.arena, FakeArena):
        arena.check()
        if arena.committed < (needed := plane.pool.bytes_behind(table.committed_units)):
            raise Unaccounted(f"{needed} bytes should be committed, {arena.committed} are")
        if scheduler_of(scheduler).resizer._growth is None and arena.committed > needed:
            raise Unaccounted(f"nothing grows, and {arena.committed} bytes are not {needed}")
    live = [req for req in scheduler.reqs.values() if req.kv is not None]
    rows = {req.req_pool_idx: req for req in live}
    if rows.keys() != set(table.sequence_ids) or len(rows) != len(live):
        raise Unaccounted(f"rows {sorted(rows)} have KV, the table knows {table.sequence_ids}")
    block = table.shape.block_tokens
    uncached = 0
    for row, req in rows.items():
        length = req.kv_committed_len
        if table.length_of(row) != length:
            raise Unaccounted(
                f"request {req.rid} has {length} tokens, its sequence {table.length_of(row)}"
            )
        slots = plane.req_to_token_pool.req_to_token[row, :length:block].numpy()
        if not np.array_equal(slots // block, table.blocks_of(row)):
            raise Unaccounted(f"request {req.rid}: its blocks are not its slots'")
        uncached += table.shape.blocks_for(req.kv.kv_allocated_len) * block
        uncached -= req.cache_protected_len
    # As SGLang's SchedulerInvariantChecker counts when it is busy.
    sizes = (
        plane.allocator.available_size(),
        plane.tree.evictable_size(),
        plane.tree.protected_size(),
    )
    if sum(sizes) + uncached != plane.logical_tokens:
        raise Unaccounted(
            f"of {plane.logical_tokens} slots, {sizes[0]} are free, {sizes[1]} evictable, "
            f"{sizes[2]} protected and {uncached} requests' own"
        )
    _check_owners(plane, live)


def _check_owners(plane: Plane, live: list[Any]) -> None:
    """Every allocated block has one owner, the tree or a request, and a reference of each that
    maps it."""
    table, block = plane.table, plane.table.shape.block_tokens
    references = np.zeros(table.num_blocks + 1, np.int64)
    tree = _blocks_of_tree(plane)
    if len(np.unique(tree)) != len(tree):
        raise Unaccounted("the tree holds a block twice")
    references[tree] += 1
    for req in live:
        blocks = table.blocks_of(req.req_pool_idx)
        references[blocks] += 1
        references[blocks[req.cache_protected_len // block :]] += 1
    held = table.references(np.arange(table.num_blocks + 1, dtype=np.int32))
    if len(wrong := np.flatnonzero(references != held)):
        b = int(wrong[0])
        raise Unaccounted(f"block {b} has {held[b]} references, {references[b]} are owed")


def _blocks_of_tree(plane: Plane, idle: bool = False) -> Any:
    """`idle`: those that nobody uses."""
    if not isinstance(plane.tree, EllmRadixCache):
        return np.empty(0, np.int64)
    values, nodes = [np.empty(0, np.int64)], list(plane.tree.root_node.children.values())
    for node in nodes:
        if not (idle and node.lock_ref):
            values.append(node.value.numpy()[:: plane.tree.page_size])
        nodes += node.children.values()
    return np.concatenate(values) // plane.tree.page_size


def prepare_prompts(plane: Plane, decoding: list[int], prepare: Callable[[], None]) -> None:
    """`prepare` gives a batch of prompts its memory, and none of those `decoding` loses any.

    Raises:
        Unaccounted: they do.
    """
    before = int(plane.table.uncached_tokens(decoding).sum())
    prepare()
    if (missing := int(plane.table.uncached_tokens(decoding).sum())) > before:
        raise Unaccounted(f"prompts took {missing - before} tokens from those who decode")


def check_positions(plan: StepPlan, batch: Any) -> None:
    """SGLang computes rows of prompts and of mixed steps at the positions that the plan has.

    Raises:
        Unaccounted: it does not.
    """
    if not batch.forward_mode.is_extend():
        return
    planned = [request.new.position for request in plan.groups[0].requests]
    if (theirs := list(batch.prefix_lens)) != planned:
        raise Unaccounted(f"rows begin at positions {theirs}, in the plan at {planned}")


def check_rows(plane: Plane, plan: StepPlan, batch: Any) -> None:
    """A step has no more rows than there is memory for: of prompts a block at least, and a block
    beside those that decode; of a request that decodes alone, whom SGLang would end, as many as the
    buffers hold.

    Raises:
        Unaccounted: it has.
    """
    most, block = plane.configuration.step_rows, plane.configuration.block_tokens
    if most is None:
        return
    mode, rows = batch.forward_mode, plan.new_rows + plan.recomputed_rows
    if mode.is_decode():
        allowed = max(most, len(batch.reqs) + block)
        if len(batch.reqs) == 1:
            allowed = max(allowed, 1 + plane.elastic.max_restored_tokens)
    elif plane.configuration.chunk is not None and not mode.is_mixed():
        allowed, rows = max(most // block * block, block), plan.new_rows
    else:
        return
    if rows > allowed:
        raise Unaccounted(f"{rows} rows in a step that has memory for {allowed}")


def watch_matches(plane: Plane) -> None:
    """From now on, what the tree offers to a request is checked to be all there."""
    tree, table = plane.tree, plane.table
    if not isinstance(tree, EllmRadixCache):
        return
    match = tree.match_prefix

    def watched(params: Any) -> Any:
        result = match(params)
        blocks = result.device_indices.numpy()[:: tree.page_size] // tree.page_size
        if not tree._match_all and table.depth(blocks).any():
            raise Unaccounted(f"blocks {blocks.tolist()} match, but not all of them are there")
        return result

    tree.match_prefix = watched  # type: ignore[method-assign]


def check_room(plane: Plane, reclaimable: int) -> None:
    """Of cached prefixes nobody counts more as room on the device than they have there.

    Raises:
        Unaccounted: somebody does.
    """
    if reclaimable > (tokens := plane.table.shape.tokens_in(_idle_units(plane))):
        raise Unaccounted(f"idle prefixes count as {reclaimable} device tokens and hold {tokens}")


def _idle_units(plane: Plane) -> int:
    """Of cached prefixes that nobody uses."""
    return int(np.count_nonzero(plane.table.units[_blocks_of_tree(plane, idle=True)] != NONE))


def watch_room(plane: Plane) -> None:
    """From now on, what is offered to policies and to who waits is checked to be there, and idle
    prefixes to make way as far as they count."""
    reclaim, shape = plane.elastic._reclaim, plane.table.shape

    def reclaimed(tokens: int) -> int:
        idle, before = _idle_units(plane), plane.table.used_units
        result = reclaim(tokens)
        promised = min(shape.blocks_for(tokens) * shape.num_groups, idle)
        if (freed := before - plane.table.used_units) < promised:
            raise Unaccounted(f"idle prefixes freed {freed} units, {promised} were counted on")
        return result

    plane.elastic._reclaim = reclaimed
    for name in ("memory_state", "admission_room"):
        original = getattr(plane.elastic, name)

        def watched(*args: Any, original: Any = original) -> Any:
            check_room(plane, args[-1])
            return original(*args)

        setattr(plane.elastic, name, watched)


def check_empty(plane: Plane) -> None:
    """After a flush, all is free.

    Raises:
        Unaccounted: what is not.
    """
    table, host = plane.table, plane.table.host
    left = {
        "units": table.used_units,
        "blocks": table.num_blocks - table.free_blocks,
        "missing units": table.missing_units,
        "sequences": len(table.sequence_ids),
        "host units": host.num_units - host.free_units,
        "rows": plane.req_to_token_pool.size - plane.req_to_token_pool.available_size(),
    }
    if any(left.values()):
        raise Unaccounted(f"left after the last request: {left}")


def digest(plane: Plane) -> bytes:
    """What the tables of two ranks must agree in."""
    table = plane.table
    sizes = table.unit_limit, table.committed_units
    parts = [table.units, table.host.units, table.host.filling, table.references(range(1))]
    parts += [table.references(np.arange(table.num_blocks + 1, dtype=np.int32))]
    sequences = [(s, table.length_of(s), table.blocks_of(s).tolist()) for s in table.sequence_ids]
    return repr((sizes, sequences, [hash(p.tobytes()) for p in parts])).encode()
