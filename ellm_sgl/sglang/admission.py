"""Hooks where SGLang's scheduler admits waiting requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.memory import AdmissionRoom, PromptRoom
from ellm_sgl.sglang.context import context_of, rows_of
from ellm_sgl.sglang.scheduler import scheduler_of
from ellm_sgl.sglang.tree_blocks import blocks_of
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

_ACCOUNT = "_ellm_account"
"""Attribute of a `PrefillAdder`: its `_Account`,"""
_PROMPTS = "_ellm_prompts"
"""and its `PromptRoom`."""


class _Account:
    """What a `PrefillAdder` is charged with for slots that exist but have no memory behind them: as
    many as leave the request considered next what there is room for at its own ratio.

    Args:
        adder: before anything was admitted.
        room: in device memory.
        slots: that it counts on.
    """

    def __init__(self, adder: PrefillAdder, room: AdmissionRoom, slots: int) -> None:
        self.room = room
        self.eventual = self.present = 0.0
        """Slots charged."""
        self._adder = adder
        self._slots = slots
        self._admitted = 0.0
        """Slots that SGLang has charged for those admitted."""

    def offer(self, ratio: float) -> None:
        """The next request is of this ratio."""
        self.charge(-1)
        theirs = adapter().charged(self._adder)
        now, eventually = self.room.offer(ratio, theirs - self._admitted)
        self.eventual = max(self._slots - theirs - eventually, 0)
        self.present = max(self._slots - now, 0)
        self.charge(1)

    def take(self, ratio: float, slots: float) -> None:
        """SGLang has charged so many slots for it."""
        self.room.take(ratio, slots)
        self._admitted += slots

    def charge(self, sign: int) -> None:
        """1: charge; -1: take it back."""
        adapter().charge(self._adder, sign * self.eventual, sign * self.present)


def limit_admission(_: None, adder: PrefillAdder, *args: Any, **kwargs: Any) -> None:
    """After `PrefillAdder.__init__`: charge it for the slots that have no memory behind them."""
    ours = scheduler_of(adder)
    iteration, reclaimable = ours.iteration, ours.reclaimable_on_device()
    slots = adder.token_to_kv_pool_allocator.available_size() + ours.reclaimable()
    decoding = len(adder.running_batch.reqs)
    table, step = iteration.elastic.table, iteration.elastic.room
    left = step.for_prompts(*_beside(adder))
    free = slots // adder.page_size - _begun(adder)
    setattr(adder, _PROMPTS, PromptRoom.of(table, decoding, reclaimable, step, left, free))
    account = _Account(adder, iteration.elastic.admission_room(reclaimable), slots)
    setattr(adder, _ACCOUNT, account)
    account.offer(iteration.in_force.first_ratio)
    iteration.refused(account.room.tokens(iteration.in_force.first_ratio)[1])


def admit(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Around `add_one_req`: the policy says who is admitted; memory says how many of them now."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    ours = scheduler_of(adder)
    rank = ours.rank(req)
    if rank is None:
        return AddReqResult.OTHER
    ratio = ours.iteration.in_force.admitted_ratios[rank]
    prompts: PromptRoom = getattr(adder, _PROMPTS)
    fits = _limit_rows(adder, req)
    needs = _first_tokens(adder, req), ratio, _idle_prefix(adder, req)
    if not (fits and prompts.has(*needs)):
        return AddReqResult.OTHER
    account: _Account = getattr(adder, _ACCOUNT)
    account.offer(ratio)
    ours.iteration.refused(account.room.tokens(ratio)[1], int(ours.entries([req])[0]))
    before = adapter().charged(adder)
    result = _consider(original, adder, req, *args, **kwargs)
    account.take(ratio, adapter().charged(adder) - before)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        prompts.take(*needs)
        prompts.compute(needs[0], _all_logits(req))
        if adder.new_chunked_req is req:
            ours.prompt_ratio = ratio
    return result


def _first_tokens(adder: PrefillAdder, req: Req) -> int:
    """Tokens of a prompt that the step would compute."""
    rows = len(req.full_untruncated_fill_ids) - adapter().prefix_tokens(req)
    return rows if adder.rem_chunk_tokens is None else min(rows, max(adder.rem_chunk_tokens, 0))


def _beside(adder: PrefillAdder) -> tuple[int, int]:
    """Of the step that is being put together: requests that decode in it, and rows that it computes
    again, for them and for the prompt that is under way."""
    scheduler, table = scheduler_of(adder).scheduler, context_of(adder).table
    decoding = adder.running_batch.reqs if scheduler.is_mixed_chunk else []
    under_way = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    if not table.missing_units:
        return len(decoding), 0
    reqs = [req for req in (*decoding, *under_way) if not req.finished()]
    there = set(table.sequence_ids)
    rows = [row for row in rows_of(reqs) if row in there]
    return len(decoding), int(table.uncached_tokens(rows).sum())


def _begun(adder: PrefillAdder) -> int:
    """Blocks that those who decode in the step begin: their slots come after the prompts'."""
    ours, batch = scheduler_of(adder), adder.running_batch
    going = [i for i, req in enumerate(batch.reqs) if not req.finished()]
    if not (ours.scheduler.is_mixed_chunk and going):
        return 0
    tokens = batch.new_tokens_required_next_decode(ours.stepping(batch, going))
    return int(tokens // adder.page_size)


def _limit_rows(adder: PrefillAdder, req: Req) -> bool:
    """Let the step compute no more rows than its activations may take memory for; False: a prompt
    that cannot be divided waits for a step of its own."""
    rows = getattr(adder, _PROMPTS).rows(_all_logits(req))
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens = int(min(adder.rem_chunk_tokens, rows))
        return True
    return not adder.can_run_list or _first_tokens(adder, req) <= rows


def _all_logits(req: Req) -> bool:
    """Whether logits of its prompt are asked for, not of the last token alone."""
    return bool(req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids) - 1)


def _idle_prefix(adder: PrefillAdder, req: Req) -> int:
    """Device tokens of the prefix that a request finds cached, and that nobody has used until now:
    what it has there, and where what only the host has of it is fetched to."""
    table, elastic = context_of(adder).table, scheduler_of(adder).iteration.elastic
    blocks, units, node = 0, 0, req.last_node
    while node is not None and node.parent is not None and node.lock_ref == 0:
        there = int(table.holds_units(of := blocks_of(node, adder.page_size)).sum())
        blocks, units = blocks + there, units + elastic.slots * (len(of) - there)
        node = node.parent
    return (blocks + -(-units // table.shape.num_groups)) * adder.page_size


def _consider(
    original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """`add_one_req`. A request that would have the device to itself may be larger than it."""
    from sglang.srt.managers.schedule_policy import AddReqResult

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
    account: _Account = getattr(adder, _ACCOUNT)
    growth = account.eventual - account.present
    adapter().charge(adder, 0, growth)
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        adapter().charge(adder, 0, -growth)


def continue_chunked(original: Callable[..., Any], adder: PrefillAdder, req: Req) -> Any:
    """Around `add_chunked_req`: a chunk is as large as there is room for (`PromptRoom`); without
    any it stays where it is, as SGLang itself leaves one without room for its sliding window.
    Where nobody decodes, later chunks evict earlier ones where they must."""
    ours = scheduler_of(adder)
    prompts: PromptRoom = getattr(adder, _PROMPTS)
    _limit_rows(adder, req)
    tokens = _first_tokens(adder, req)
    further = prompts.further(adapter().prefix_tokens(req), tokens, ours.under_way().own)
    if further < tokens:
        adder.rem_chunk_tokens = further  # nor does another prompt begin
    if further == 0:
        return req
    prompts.compute(further, _all_logits(req))
    return _unlimited(original, adder, (req,), {})


def _unlimited(original: Callable[..., Any], adder: PrefillAdder, args: Any, kwargs: Any) -> Any:
    account: _Account = getattr(adder, _ACCOUNT)
    account.charge(-1)
    try:
        return original(adder, *args, **kwargs)
    finally:
        account.charge(1)
