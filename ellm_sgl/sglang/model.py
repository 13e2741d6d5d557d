"""Hooks around the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.engine.decision import FETCH_ALL
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.scheduler import scheduler_of
from ellm_sgl.step import planned_work

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


_SEQ_IDS = "_ellm_seq_ids"
"""Attribute of a `ForwardBatch`: its requests' rows, known to the host."""


def note_requests(result: ForwardBatch, _: type, batch: ScheduleBatch, *__: Any, **___: Any) -> Any:
    """After `ForwardBatch.init_new`: asking the device whose rows these are would wait for it."""
    rows = batch.req_pool_indices_cpu
    setattr(result, _SEQ_IDS, [] if rows is None else rows.tolist())
    return result


def run_step(
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `ModelRunner.forward`: plan the step, then run SGLang's forward under the plan."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return original(runner, forward_batch, *args, **kwargs)
    ours, seq_ids = context_of(runner), getattr(forward_batch, _SEQ_IDS)
    ours.attach(runner.model.model)
    if (iteration := ours.iteration) is None:  # it warms up before its scheduler stands
        split = FETCH_ALL
        if mode.is_decode():
            plan = ours.planner.decode(seq_ids, split)
        else:
            plan = ours.planner.extend(seq_ids, forward_batch.extend_seq_lens_cpu, split)
        with ours.executor.execute(plan):
            return original(runner, forward_batch, *args, **kwargs)
    if mode.is_decode():
        plan = iteration.plan_decode(ours.planner, seq_ids, scheduler_of(runner).fetching_ahead())
    else:
        plan = iteration.plan_extend(ours.planner, seq_ids, forward_batch.extend_seq_lens_cpu)
    rows = plan.new_rows + plan.recomputed_rows
    iteration.elastic.room.reserve(rows, _logit_rows(forward_batch), len(plan.borrowed))
    work = planned_work(plan, _prompts(runner, mode, len(seq_ids)))
    with iteration.execute(ours.executor, plan, work):
        return original(runner, forward_batch, *args, **kwargs)


def _prompts(runner: ModelRunner, mode: ForwardMode, requests: int) -> int:
    """How many of a step's requests compute prompts: the first ones, where SGLang mixes others in
    that decode."""
    if mode.is_decode():
        return 0
    return len(scheduler_of(runner).prefilling) if mode.is_mixed() else requests


def _logit_rows(batch: ForwardBatch) -> int:
    """Rows of which logits are computed."""
    if batch.forward_mode.is_decode() or not batch.return_logprob:
        return int(batch.batch_size)
    lengths, starts = batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu
    assert lengths is not None and starts is not None
    return sum(max(n - first, 1) for n, first in zip(lengths, starts, strict=True))
