"""Hooks where SGLang's scheduler decides about the memory of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl.sglang.context import context_of, rows_of
from ellm_sgl.sglang.paused import counts_tokens
from ellm_sgl.sglang.scheduler import scheduler_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def map_extended(result: Any, batch: ScheduleBatch) -> Any:
    """After `alloc_for_extend`: note the blocks of every request in a prefill batch."""
    ours = context_of(batch)
    scheduler_of(batch).prefilling = rows_of(batch.reqs)
    ours.elastic.room.prompt_rows = batch.extend_num_tokens
    with ours.elastic.totals.bookkeeping():
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            ours.map_request(req, batch.req_to_token_pool.req_to_token, length)
    return result


def map_decoded(out_cache_loc: Any, batch: ScheduleBatch, token_per_req: int) -> Any:
    """After `alloc_for_decode`: each request has a token more."""
    scheduler, table = scheduler_of(batch), context_of(batch).table
    seq_ids = rows_of(batch.reqs)
    slots = out_cache_loc.cpu().numpy()
    with scheduler.iteration.elastic.totals.bookkeeping():
        table.extend_each(seq_ids, slots // table.shape.block_tokens)
    scheduler.iteration.in_step(scheduler.entries(batch.reqs), table.lengths_of(seq_ids))
    return out_cache_loc


def check_decode_memory(
    original: Callable[..., bool],
    batch: ScheduleBatch,
    selected_indices: Sequence[int] | None = None,
) -> bool:
    """Around `check_decode_mem`: make room for the next token of each request by evicting.

    Paused requests need none, but may be retracted like any other: they hold blocks
    that cannot be evicted. False, whereupon SGLang retracts a request, only when the rows to
    recompute exceed what one step can, or the requests are so many that not even their last
    blocks fit.
    """
    if not original(batch, selected_indices=selected_indices):
        return False
    ours = scheduler_of(batch)
    if ours.prefilling:  # a mixed step, of which 0.5.23 asks: `prepare_decode` makes it fit
        return True
    if selected_indices is None:
        ours.evict_paused(batch)
        selected_indices = range(len(batch.reqs))
    return _fits(batch, ours.stepping(batch, selected_indices))


def _fits(batch: ScheduleBatch, indices: Sequence[int], others: Sequence[int] = ()) -> bool:
    """Make room for a token of each of these requests of `batch`, as far as possible.

    Args:
        others: `seq_id` of prompts in the same step.

    Returns:
        Whether there is room, and one step can restore what it has to.
    """
    ours, tokens = scheduler_of(batch), batch.new_tokens_required_next_decode(indices)
    if not _has_slots(batch, tokens):
        return False
    seq_ids = rows_of([batch.reqs[i] for i in indices])
    blocks = tokens // context_of(batch).table.shape.block_tokens
    return ours.iteration.make_room(blocks, seq_ids, others)


def _has_slots(batch: ScheduleBatch, tokens: int) -> bool:
    """Whether there are so many slots, whatever memory is behind them: beside prompts SGLang does
    not look."""
    slots = batch.token_to_kv_pool_allocator.available_size() + scheduler_of(batch).reclaimable()
    return bool(tokens <= slots)


def count_retractions(result: Any, batch: ScheduleBatch, *args: Any) -> Any:
    """After `retract_decode`: (retracted requests, new token ratio, aborted requests)."""
    retracted, _, aborted = result
    ours = scheduler_of(batch)
    ours.iteration.elastic.totals.retractions += len(retracted) + len(aborted)
    ours.retracted(retracted)
    return result


def prepare_decode(batch: ScheduleBatch) -> None:
    """Before `prepare_for_decode`: those whom the policy pauses leave the batch, the others come
    to its ratios.

    SGLang does not check a mixed step's memory. As many requests decode beside a prompt as there
    is room for in the device pool and in one pass, those that miss least first; and one at least,
    whose token may have to do without a unit and be recomputed in the next step. Where slots are
    short, those that need none come first.
    """
    ours = scheduler_of(batch)
    context_of(batch).may_evict = True
    ours.evict_paused(batch)
    stay = ours.stepping(batch, range(len(batch.reqs)))
    if ours.prefilling:
        stay = _beside_prompts(batch, stay, ours.prefilling)
    ours.paused.take_out(batch, stay)
    ours.iteration.bring_to_ratios(rows_of(batch.reqs))


def place_decoded(_: Any, batch: ScheduleBatch, running_batch: ScheduleBatch) -> None:
    """After `mix_with_running`: the positions of rows that decode in a mixed step.

    SGLang reckons that a request's output is a step behind, as it is under overlap scheduling of
    all that took part in the step before. Of one that sat that out it is not.
    """
    if count := running_batch.batch_size():
        batch.prefix_lens[-count:] = (batch.seq_lens_cpu[-count:] - 1).tolist()


def _beside_prompts(batch: ScheduleBatch, indices: list[int], prompts: Sequence[int]) -> list[int]:
    """Those of these requests that one step can decode beside these prompts."""
    if _fits(batch, indices, prompts):
        return indices
    if counts_tokens(batch):  # see `EllmScheduler.stepping`
        return indices
    seq_ids = rows_of([batch.reqs[i] for i in indices])
    missing = context_of(batch).table.uncached_tokens(seq_ids)
    begins = np.zeros(len(indices), bool)
    if not _has_slots(batch, batch.new_tokens_required_next_decode(indices)):
        begins = np.array([batch.new_tokens_required_next_decode([i]) > 0 for i in indices])
    fewest_first = [indices[i] for i in np.lexsort((missing, begins)).tolist()]
    while len(fewest_first) > 1 and not _fits(batch, fewest_first, prompts):
        fewest_first.pop()
    return fewest_first
