"""Hooks where SGLang's scheduler decides about memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl.sglang import runtime
from ellm_sgl.sglang.deciding import deciding, may_join

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder

_SURPLUS = "_ellm_surplus"
"""Attribute of a `PrefillAdder`: (eventual, present) slots that exist but have no memory."""


def map_extended(result: Any, batch: ScheduleBatch) -> Any:
    """After `alloc_for_extend`: note the blocks of every request in a prefill batch."""
    ours = runtime.current()
    rows = batch.req_to_token_pool.req_to_token
    deciding().prefilling = runtime.rows_of(batch.reqs)
    with ours.bookkeeping():
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            ours.map_request(req, rows[runtime.row_of(req), :length].cpu().numpy(), length)
    return result


def map_decoded(out_cache_loc: Any, batch: ScheduleBatch, token_per_req: int) -> Any:
    """After `alloc_for_decode`: each request has a token more."""
    ours = runtime.current()
    seq_ids = runtime.rows_of(batch.reqs)
    deciding().token_decoded(batch.reqs, seq_ids)
    slots = out_cache_loc.cpu().numpy()
    with ours.bookkeeping():
        ours.table.extend_each(seq_ids, slots // ours.table.shape.block_tokens)
    return out_cache_loc


def check_decode_memory(
    original: Callable[..., bool],
    batch: ScheduleBatch,
    selected_indices: Sequence[int] | None = None,
) -> bool:
    """Around `check_decode_mem`: make room for the next token of each request by evicting.

    Requests that sit the step out need none, but may be retracted like any other: they hold blocks
    that cannot be evicted. False, whereupon SGLang retracts a request, only when the rows to
    recompute no longer fit the transient buffer, or the requests are so many that not even their
    last blocks fit.
    """
    if not original(batch, selected_indices=selected_indices):
        return False
    ours = deciding()
    if selected_indices is None:
        ours.rest(batch.reqs)
        selected_indices = range(len(batch.reqs))
    return _fits(batch, ours.stepping(batch, selected_indices))


def _fits(batch: ScheduleBatch, indices: Sequence[int], others: Sequence[int] = ()) -> bool:
    """Make room for a token of each of these requests of `batch`, as far as possible.

    Args:
        others: `seq_id` of prompts in the same step.

    Returns:
        Whether there is room, and one step can restore what it has to.
    """
    ours = runtime.current()
    elastic, shape = ours.elastic, ours.table.shape
    units = batch.new_tokens_required_next_decode(indices) // shape.block_tokens * shape.num_groups
    seq_ids = runtime.rows_of([batch.reqs[i] for i in indices])
    with ours.bookkeeping():
        room = elastic.make_room_for_step(units, seq_ids)
        return room and elastic.fits_transient([*seq_ids, *others])


def count_retractions(result: Any, batch: ScheduleBatch, *args: Any) -> Any:
    """After `retract_decode`: (retracted requests, new token ratio, aborted requests)."""
    retracted, _, aborted = result
    runtime.current().elastic.totals.retractions += len(retracted) + len(aborted)
    deciding().retracted(retracted)
    return result


def prepare_decode(batch: ScheduleBatch) -> None:
    """Before `prepare_for_decode`: those whom the policy pauses sit the step out, the others come
    to its ratios.

    SGLang does not check a mixed step's memory. As many requests decode beside a prompt as there
    is room for in the device pool and in one pass, those that miss least first; and one at least,
    whose token may have to do without a unit and be recomputed in the next step.
    """
    ours = deciding()
    ours.rest(batch.reqs)
    stay = ours.stepping(batch, range(len(batch.reqs)))
    if ours.prefilling:
        stay = _beside_prompts(batch, stay, ours.prefilling)
    ours.take_out(batch, stay)
    ours.apply_targets(batch.reqs)


def _beside_prompts(batch: ScheduleBatch, indices: list[int], prompts: Sequence[int]) -> list[int]:
    """Those of these requests that one step can decode beside these prompts."""
    if _fits(batch, indices, prompts):
        return indices
    if batch.sampling_info.penalizer_orchestrator.is_required:  # see `Deciding.stepping`
        return indices
    seq_ids = runtime.rows_of([batch.reqs[i] for i in indices])
    missing = runtime.current().elastic.uncached_tokens(seq_ids)
    fewest_first = [indices[i] for i in np.argsort(missing, kind="stable").tolist()]
    while len(fewest_first) > 1 and not _fits(batch, fewest_first, prompts):
        fewest_first.pop()
    return fewest_first


def limit_admission(_: None, adder: PrefillAdder, *args: Any, **kwargs: Any) -> None:
    """After `PrefillAdder.__init__`: charge it for the slots that have no memory behind them."""
    reclaimable = adder.tree_cache.evictable_size()
    slots = adder.token_to_kv_pool_allocator.available_size() + reclaimable
    ours = deciding()
    now, eventually = runtime.current().elastic.admission_tokens(reclaimable, ours.joining_ratio)
    ours.budget_at_refusal = eventually
    setattr(adder, _SURPLUS, (max(slots - eventually, 0), max(slots - now, 0)))
    _charge(adder, 1)


def admit(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around `add_one_req`: the policy says who joins; memory says how many of them now. A
    request that would have the device to itself may be larger than the device."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not may_join(req):
        return AddReqResult.OTHER
    alone = not adder.can_run_list and not adder.running_batch.reqs
    if alone:
        return _unlimited(original, adder, (req, *args), kwargs)
    if not (req.sampling_params.ignore_eos and getattr(adder.tree_cache, "disable", True)):
        return original(adder, req, *args, **kwargs)
    # SGLang foresees the growth of requests of known lengths within what is free at present. The
    # prompt has to fit into that, but growth into what there is room for in the long run.
    blocks = runtime.current().table.shape.blocks_for(
        len(req.origin_input_ids) + len(req.output_ids)
    )
    if blocks * adder.page_size > adder.cur_rem_tokens:
        return AddReqResult.NO_TOKEN
    eventual, present = getattr(adder, _SURPLUS)
    adder.cur_rem_token_offset += eventual - present
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        adder.cur_rem_token_offset -= eventual - present


def continue_chunked(original: Callable[..., Any], adder: PrefillAdder, *args: Any) -> Any:
    """Around `add_chunked_req`: later chunks evict earlier ones where they must."""
    return _unlimited(original, adder, args, {})


def _unlimited(original: Callable[..., Any], adder: PrefillAdder, args: Any, kwargs: Any) -> Any:
    _charge(adder, -1)
    try:
        return original(adder, *args, **kwargs)
    finally:
        _charge(adder, 1)


def _charge(adder: PrefillAdder, sign: int) -> None:
    eventual, present = getattr(adder, _SURPLUS)
    adder.rem_total_token_offset += sign * eventual
    adder.cur_rem_token_offset += sign * present
