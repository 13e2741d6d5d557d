"""Hooks around the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang import runtime
from ellm_sgl.step import planned_work

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
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
    ours = runtime.current()
    if forward_batch.forward_mode.is_idle():
        return original(runner, forward_batch, *args, **kwargs)
    seq_ids = getattr(forward_batch, _SEQ_IDS)
    if forward_batch.forward_mode.is_decode():
        plan = ours.plan_decode(seq_ids)
        decoding = True
    else:
        decoding = False
        plan = ours.plan_extend(seq_ids, forward_batch.extend_seq_lens_cpu)
    if ours.deciding is not None:
        ours.deciding.loop.steps.start(planned_work(plan, decoding))
    with ours.running(runner, plan):
        return original(runner, forward_batch, *args, **kwargs)
