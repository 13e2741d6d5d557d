"""Hooks where SGLang's scheduler admits waiting requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.scheduler import scheduler_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

_SURPLUS = "_ellm_surplus"
"""Attribute of a `PrefillAdder`: (eventual, present) slots that exist but have no memory."""


def limit_admission(_: None, adder: PrefillAdder, *args: Any, **kwargs: Any) -> None:
    """After `PrefillAdder.__init__`: charge it for the slots that have no memory behind them."""
    reclaimable = adder.tree_cache.evictable_size()
    slots = adder.token_to_kv_pool_allocator.available_size() + reclaimable
    iteration = scheduler_of(adder).iteration
    now, eventually = iteration.admission_tokens(reclaimable)
    iteration.refused(eventually)
    setattr(adder, _SURPLUS, (max(slots - eventually, 0), max(slots - now, 0)))
    _charge(adder, 1)


def admit(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around `add_one_req`: the policy says who is admitted; memory says how many of them now. A
    request that would have the device to itself may be larger than the device."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if scheduler_of(adder).rank(req) is None:
        return AddReqResult.OTHER
    alone = not adder.can_run_list and not adder.running_batch.reqs
    if alone:
        return _unlimited(original, adder, (req, *args), kwargs)
    if not (req.sampling_params.ignore_eos and getattr(adder.tree_cache, "disable", True)):
        return original(adder, req, *args, **kwargs)
    # SGLang foresees the growth of requests of known lengths within what is free at present. The
    # prompt has to fit into that, but growth into what there is room for in the long run.
    blocks = context_of(adder).table.shape.blocks_for(
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
