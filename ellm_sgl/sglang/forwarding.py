"""Hook around the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.forward import MixedRows
from ellm_sgl.sglang import runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_rows: MixedRows | None = None


def run_step(
    original: Callable[..., Any],
    runner: ModelRunner,
    forward_batch: ForwardBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `ModelRunner.forward`: plan the step, then run SGLang's forward under the plan."""
    global _rows
    ours = runtime.current()
    if forward_batch.forward_mode.is_idle():
        return original(runner, forward_batch, *args, **kwargs)
    if _rows is None:
        _rows = MixedRows(runner.model.model, ours.table.shape)
    seq_ids = forward_batch.req_pool_indices.tolist()
    if forward_batch.forward_mode.is_decode():
        plan = ours.plan_decode(seq_ids)
    else:
        plan = ours.plan_extend(seq_ids, forward_batch.extend_seq_lens_cpu)
    ours.plan = plan
    try:
        with _rows.running(plan):
            return original(runner, forward_batch, *args, **kwargs)
    finally:
        ours.plan = None
