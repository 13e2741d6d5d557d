"""What a request may bring: looked at where it is tokenized, and where the scheduler takes it.

The first look gives the caller a 400 at once. The second is for requests that were tokenized in a
process without eLLM's hooks: they too get an error of their own, and nobody else notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.config.ranges import shown
from ellm_sgl.sglang import enabling
from ellm_sgl.sglang.slo import check_slos

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler

_EMBEDDINGS = ("input_embeds", "embed_overrides", "positional_embed_overrides")
"""Fields that bring rows which cannot be computed again from token ids."""
_PLACES = "token_indices_to_pool"
"""Field of SGLang 0.5.23 and later, for scores: places that it looks for in the step's rows."""


def check(request: Any, input_ids: Sequence[int] | None, vocabulary: int) -> None:
    """Raise ValueError for what eLLM cannot serve: embeddings, places in a prompt that has to be
    computed at once, and token ids outside of the vocabulary, which would end the scheduler on a
    CPU.

    Args:
        request: with SGLang's fields of a request, tokenized or not.
        vocabulary: number of token ids.
    """
    for name in _EMBEDDINGS:
        if getattr(request, name, None) is not None:
            raise ValueError(f"{name}: not supported with eLLM; send text or input_ids")
    if getattr(request, _PLACES, None) is not None:
        raise ValueError(
            f"{_PLACES}: not supported with eLLM, which may compute a prompt in parts; leave it out"
        )
    _check_beams(getattr(request, "sampling_params", None))
    if not input_ids:
        return
    for token_id in (min(input_ids), max(input_ids)):
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"input_ids: {token_id} is not a token id, 0 <= id < {vocabulary}")


def _check_beams(sampling_params: Any) -> None:
    """Raise ValueError for beams (SGLang 0.5.20 and later): their rows belong to no request."""
    for params in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        given = params.get("beam_width") if isinstance(params, dict) else None
        width = given or getattr(params, "beam_width", None)
        if width not in (None, 1):
            raise ValueError(f"beam_width: {shown(width)} is not supported with eLLM; leave it out")


def check_request(manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """Hook before `TokenizerManager._validate_one_request`; a ValueError, of `check` or about an
    SLO that makes no sense, becomes a 400."""
    if enabling.settings_of(manager) is None:
        return
    check_slos(getattr(request, "sampling_params", None))
    check(request, input_ids, manager.model_config.vocab_size)


def take_request(
    original: Callable[..., None],
    scheduler: Scheduler,
    request: TokenizedGenerateReqInput,
    **others: Any,
) -> None:
    """Around `Scheduler.handle_generate_request`: what cannot be served is answered with an
    error, the way SGLang's scheduler answers requests that it cannot serve."""
    try:
        check_slos({"custom_params": request.sampling_params.custom_params})
        check(request, request.input_ids, scheduler.model_config.vocab_size)
    except ValueError as error:
        _refuse(scheduler, request, str(error))
    else:
        original(scheduler, request, **others)


def _refuse(scheduler: Scheduler, request: TokenizedGenerateReqInput, message: str) -> None:
    from sglang.srt.managers.schedule_batch import Req

    refused = Req(
        request.rid,
        request.input_text,
        request.input_ids,
        request.sampling_params,
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=request.http_worker_ipc,
    )
    refused.sampling_params.custom_params = None
    refused.tokenizer = scheduler.tokenizer
    refused.set_finish_with_abort(message)
    scheduler.init_req_max_new_tokens(refused)
    scheduler._add_request_to_queue(refused)
