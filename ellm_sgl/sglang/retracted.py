"""Requests that were retracted in mid-answer, and are prefilled again with their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def count_again(info: SamplingBatchInfo, _: Any, batch: ScheduleBatch, *__: Any) -> None:
    """Hook after `SamplingBatchInfo.from_schedule_batch`, with which a prefill begins. SGLang
    counts an answer's tokens as they are decoded: those before a retraction would go without
    penalties, and `min_new_tokens` would begin anew."""
    orchestrator = info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    from sglang.srt.sampling.penaltylib import (
        BatchedFrequencyPenalizer,
        BatchedMinNewTokensPenalizer,
        BatchedPresencePenalizer,
        BatchedRepetitionPenalizer,
    )

    counted = {row: _counted(req, batch) for row, req in enumerate(batch.reqs) if req.output_ids}
    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        for row, tokens in counted.items():
            if kind is BatchedMinNewTokensPenalizer:
                penalizer.len_output_tokens[row] = len(tokens)
            elif kind is BatchedFrequencyPenalizer:
                each = penalizer.frequency_penalties[row].expand(len(tokens))
                penalizer.cumulated_frequency_penalties[row].index_add_(0, tokens, each)
            elif kind is BatchedPresencePenalizer:
                penalizer.cumulated_presence_penalties[row, tokens] = penalizer.presence_penalties[
                    row
                ]
            elif kind is BatchedRepetitionPenalizer:
                penalizer.cumulated_repetition_penalties[row, tokens] = (
                    penalizer.repetition_penalties[row]
                )


def _counted(req: Req, batch: ScheduleBatch) -> torch.Tensor:
    """The tokens that SGLang has counted when it samples after a request's latest one. Where it
    samples before it has seen the step before (overlap scheduling), it is one behind, and has begun
    with the prompt's last."""
    tokens = list(req.output_ids)
    if batch.enable_overlap:
        tokens = [req.origin_input_ids[-1], *tokens[:-1]]
    return torch.tensor(tokens, dtype=torch.int64, device=batch.device)


def keep_one_state(_: int, __: Any, *, req: Req, store: bool = True, **___: Any) -> None:
    """Hook after `_append_prefill_hidden_states`: of a request with output only the latest position
    is new, and SGLang has appended the rows of all."""
    if store and req.return_hidden_states is True and req.output_ids:
        rows = req.hidden_states[-1]
        if isinstance(rows[-1], list):
            req.hidden_states[-1] = rows[-1]
