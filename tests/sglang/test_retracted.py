"""What SGLang has counted of a retracted request's tokens, when it is prefilled again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.retracted import count_again, keep_one_state

declare()

VOCABULARY = 11
PROMPT = [9, 8]
OUTPUTS = [[3, 4, 3, 5], [], [7]]


def orchestrator(batch: Any) -> Any:
    from sglang.srt.sampling import penaltylib

    return penaltylib.BatchedPenalizerOrchestrator(
        VOCABULARY,
        batch,
        {
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )


def request(output: list[int], **sampling: float) -> Any:
    given = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.7,
             "min_new_tokens": 3, "stop_token_ids": {1}} | sampling  # fmt: skip
    return SimpleNamespace(
        output_ids=output,
        origin_input_ids=PROMPT,
        sampling_params=SimpleNamespace(**given),
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0),
    )


class Batch(SimpleNamespace):
    """Can be referred to weakly, as SGLang's."""


def back_again(outputs: list[list[int]], overlap: bool, **sampling: float) -> Any:
    """Penalties of requests with these outputs, which are prefilled again together."""
    reqs = [request(output, **sampling) for output in outputs]
    batch: Any = Batch(reqs=reqs, device="cpu", enable_overlap=overlap)
    info: Any = SimpleNamespace(penalizer_orchestrator=orchestrator(batch))
    count_again(info, None, batch)
    # The orchestrator has its batch while somebody else has it, as in SGLang.
    info.penalizer_orchestrator.kept = batch
    return info.penalizer_orchestrator


def penalised(penalties: Any) -> torch.Tensor:
    rows = len(OUTPUTS)
    logits = torch.linspace(-2, 2, rows * VOCABULARY).reshape(rows, VOCABULARY)
    penalties.apply(logits)
    return logits


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_are_those_of_requests_that_were_never_away(overlap: bool) -> None:
    undisturbed = Batch(reqs=[request([]) for _ in OUTPUTS], device="cpu")
    expected = []
    for row, output in enumerate(OUTPUTS):
        step_by_step = orchestrator(undisturbed)
        for token in [PROMPT[-1], *output[:-1]] if overlap and output else output:
            step_by_step.cumulate_output_tokens(torch.full((len(OUTPUTS),), token))
        expected.append(penalised(step_by_step)[row])
    assert torch.equal(penalised(back_again(OUTPUTS, overlap)), torch.stack(expected))


def test_requests_without_penalties_are_left_alone() -> None:
    none = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
            "min_new_tokens": 0}  # fmt: skip
    penalties = back_again(OUTPUTS, True, **none)
    assert not any(penalizer.is_prepared() for penalizer in penalties.penalizers.values())


def test_of_a_request_with_output_one_state_is_new() -> None:
    rows = [[0.0, 1.0], [2.0, 3.0]]
    for output, kept in (([5], rows[-1]), ([], rows)):
        req: Any = SimpleNamespace(
            return_hidden_states=True, output_ids=output, hidden_states=[list(rows)]
        )
        keep_one_state(0, None, req=req)
        assert req.hidden_states == [kept]
