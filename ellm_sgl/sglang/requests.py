"""What a request may bring: looked at where it is tokenized, and where the scheduler takes it.

The first look gives the caller a 400 at once. The second is for requests that were tokenized in a
process without eLLM's hooks: they too get an error of their own, and nobody else notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.config.ranges import ANSWERS, shown
from ellm_sgl.sglang import enabling
from ellm_sgl.sglang.sampling import check_sampling
from ellm_sgl.sglang.slo import check_slos
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_EMBEDDINGS = ("input_embeds", "embed_overrides", "positional_embed_overrides")
"""Fields that bring rows which cannot be computed again from token ids."""
_PLACES = "token_indices_to_pool"
"""Field of SGLang 0.5.23 and later, for scores: places that it looks for in the step's rows."""
_CACHE_KEYS = ("extra_key", "cache_salt")
"""Fields that keep requests' cached prefixes apart."""
_WHOLE = ("logprob_start_len", "top_logprobs_num", "priority")
"""Fields that are whole numbers, or None."""
_EMPTY = "a prompt of no token; give one at least"


def check(request: Any, input_ids: Sequence[int] | None, vocabulary: int) -> None:
    """Raise ValueError for what eLLM cannot serve: embeddings, places in a prompt that has to be
    computed at once; and for what would end SGLang's scheduler: keys of the prefix cache and names
    in a session that are no text, prompts of no token, log-probabilities of what is not there, and,
    on a CPU, token ids outside of the vocabulary. Not for what nobody reads: `_leave_out_unread`.

    Args:
        request: with SGLang's fields of a request, tokenized or not.
        vocabulary: number of token ids.
    """
    _check_embeddings(request)
    if getattr(request, _PLACES, None) is not None:
        raise ValueError(
            f"{_PLACES}: not supported with eLLM, which may compute a prompt in parts; leave it out"
        )
    for name in (*_CACHE_KEYS, "lora_id"):
        _check_text(name, getattr(request, name, None))
    for name in _WHOLE:
        if not isinstance(value := getattr(request, name, None), int | None):
            raise ValueError(
                f"{name}: {shown(value)} is no whole number; give one, or leave it out"
            )
    _check_session(getattr(request, "session_params", None))
    params = getattr(request, "sampling_params", None)
    _check_beams(params)
    _check_log_probabilities(request, vocabulary)
    if input_ids is not None and len(input_ids) == 0 and not _goes_on(request):
        raise ValueError(_EMPTY)
    for token_id in (min(input_ids), max(input_ids)) if input_ids else ():
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"input_ids: {token_id} is not a token id, 0 <= id < {vocabulary}")


def _check_log_probabilities(request: Any, vocabulary: int) -> None:
    if not getattr(request, "return_logprob", False):
        return
    first, most = request.logprob_start_len, request.top_logprobs_num
    if isinstance(first, int) and first < -1:
        raise ValueError(
            f"logprob_start_len: {shown(first)} is no place in a prompt; give 0 or more, or -1 for "
            "those of the answer alone"
        )
    if isinstance(most, int) and not 0 <= most <= vocabulary:
        raise ValueError(
            f"top_logprobs_num: {shown(most)} of {vocabulary} token ids; give 0 to {vocabulary}"
        )


def _of(params: Any, name: str) -> Any:
    """Of sampling parameters as a client sends them, or as SGLang's scheduler has them."""
    return params.get(name) if isinstance(params, dict) else getattr(params, name, None)


def _check_session(params: Any) -> None:
    for name in ("id", "rid"):
        _check_text(f"session_params: {name}", _of(params, name))
    if not isinstance(offset := _of(params, "offset"), int | None):
        raise ValueError(f"session_params: offset: {shown(offset)} is no whole number of tokens")


def _goes_on(request: Any) -> bool:
    """Whether it is a turn of a session: what was said before may be all of its prompt."""
    return bool(_of(getattr(request, "session_params", None), "id"))


def _check_embeddings(request: Any) -> None:
    for name in _EMBEDDINGS:
        if getattr(request, name, None) is not None:
            raise ValueError(f"{name}: not supported with eLLM; send text or input_ids")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str | None):
        raise ValueError(f"{name}: {shown(value)} is no text; give a string, or leave it out")


def _check_name(rid: object) -> None:
    """Of a request: who is gone is told of by it, and all names begin with an empty one."""
    _check_text("rid", rid)
    if rid == "":
        raise ValueError("rid: an empty name; give another, or leave it out")


def _check_beams(sampling_params: Any) -> None:
    """Raise ValueError for beams (SGLang 0.5.20 and later): their rows belong to no request."""
    for params in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        width = _of(params, "beam_width")
        if width not in (None, 1):
            raise ValueError(f"beam_width: {shown(width)} is not supported with eLLM; leave it out")


def check_form(manager: Any, request: Any, *_: Any, **__: Any) -> None:
    """Hook before `TokenizerManager.generate_request`: one name for one answer, one object of
    sampling parameters for all prompts or one for each, and at least one answer asked for. SGLang
    takes that for granted, and would answer 500; the ValueError becomes a 400."""
    if enabling.settings_of(manager) is None:
        return
    try:
        _check_form(request)
    except ValueError:
        # Of whom SGLang tells the scheduler, once a stream has ended, that they are gone: nobody.
        request.is_single, request.rid = False, []
        raise


def _check_form(request: Any) -> None:
    _check_embeddings(request)
    prompts, params = _prompts(request), request.sampling_params
    if prompts == 0:
        raise ValueError("an empty list of prompts; give one at least")
    each = params if isinstance(params, list) else [params or {}]
    if isinstance(params, list) and len(params) != prompts:
        how_many = "one prompt" if prompts is None else f"{prompts} prompts"
        raise ValueError(
            f"sampling_params: {len(params)} objects for {how_many}; give one object for all of "
            "them, or, for a list of prompts, a list with one for each"
        )
    for one in each:
        ANSWERS.check("n", one.get("n", 1))
    if prompts is None and each[0].get("n", 1) == 1:
        _check_name(request.rid)


def _prompts(request: Any) -> int | None:
    """How many are in a list of them; None where a request is of one prompt alone."""
    if request.text is None and request.input_ids == [] and _goes_on(request):
        return None
    given = request.input_ids if request.text is None else request.text
    if isinstance(given, list) and not (given and isinstance(given[0], int)):
        return len(given)
    return None


def check_request(manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """Hook before `TokenizerManager._validate_one_request`; a ValueError, of `check` or about an
    SLO that makes no sense, becomes a 400."""
    if enabling.settings_of(manager) is None:
        return
    _check_name(getattr(request, "rid", None))
    if not isinstance(came := getattr(request, "received_time", None), int | float | None):
        raise ValueError(f"received_time: {shown(came)} is no time; leave it out")
    params = getattr(request, "sampling_params", None)
    check_slos(params)
    check(request, input_ids, manager.model_config.vocab_size)
    known = manager.sampling_params_class.__struct_fields__
    if unknown := [name for name in params or () if name not in known]:
        raise ValueError(f"sampling_params: there is no {shown(unknown[0])}; leave it out")
    check_sampling(params or {}, manager.sampling_params_class)


def take_request(
    original: Callable[..., None],
    scheduler: Scheduler,
    request: TokenizedGenerateReqInput,
    **others: Any,
) -> None:
    """Around `Scheduler.handle_generate_request`: what cannot be served is answered with an
    error, the way SGLang's scheduler answers requests that it cannot serve."""
    try:
        _leave_out_unread(request, scheduler.model_config.vocab_size)
        check_slos({"custom_params": request.sampling_params.custom_params})
        check(request, request.input_ids, scheduler.model_config.vocab_size)
        check_sampling(request.sampling_params, type(request.sampling_params))
        _check_processor(scheduler, request.custom_logit_processor)
    except ValueError as error:
        _refuse(scheduler, request, str(error))
    else:
        _forget_replaced(scheduler, request.session_params)
        original(scheduler, request, **others)


def _check_processor(scheduler: Scheduler, text: str | None) -> None:
    """That SGLang can make a request's logit processor, where the server has them at all."""
    arguments = adapter().resolved(scheduler.server_args)
    if text is None or not arguments.enable_custom_logit_processor:
        return
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)  # SGLang keeps it
    except Exception as error:  # code of whoever sent it
        raise ValueError(
            f"custom_logit_processor: {shown(text)} cannot be made ({error!r}); give what "
            "`to_str` of a CustomLogitProcessor returns"
        ) from None


def _leave_out_unread(request: TokenizedGenerateReqInput, vocabulary: int) -> None:
    """Stop tokens that no step can sample, how many log-probabilities a request would have that
    does not ask for them, and where it would go on elsewhere: valid, and without a meaning. But a
    step does for all of its requests what one of them needs (`min_new_tokens`, log-probabilities),
    and would look at these."""
    params = request.sampling_params
    stops = {token_id for token_id in params.stop_token_ids or () if 0 <= token_id < vocabulary}
    params.stop_token_ids = stops or None
    if not request.return_logprob:
        request.top_logprobs_num = 0
    request.bootstrap_host = None  # of a server that computes prompts for others: this one does not


def name_no_token(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs: Sequence[list[int] | None],
    *others: Any,
    **more: Any,
) -> Any:
    """Around `get_token_ids_logprobs`: those of the step that name no tokens have tensors of no
    log-probabilities. SGLang has a list there, and takes it for a tensor, as are the others'."""
    return original(logprobs, [named or [] for named in token_ids_logprobs], *others, **more)


def _forget_replaced(scheduler: Scheduler, params: SessionParams | None) -> None:
    """What a turn of a session does that replaces all before it, or all that went on from one:
    SGLang removes them from a dict that it walks through, and those of one name twice, which ends
    the scheduler."""
    if params is None or not params.replace:
        return
    session = scheduler.session_controller.get(params.id)
    if session is None or session.streaming:
        return
    if params.rid is None:
        replaced = list(session.req_nodes.values())
    elif (parent := session.req_nodes.get(params.rid)) is not None:
        replaced = parent.children
        parent.children = []
    else:
        return
    while replaced:
        node = replaced.pop()
        replaced.extend(node.children)
        node.children = []
        node.abort()
        if session.req_nodes.get(node.req.rid) is node:
            del session.req_nodes[node.req.rid]


def refuse_empty(req: Req) -> None:
    """Answer a turn of a session that brings no token, and has none to go on from, with an error,
    as SGLang 0.5.20 and later do: a step ends the scheduler where it has such a prompt. Like there,
    no other turn goes on from this one."""
    if len(req.origin_input_ids) > 0:
        return
    session = req.session
    if session is not None:
        node = session.req_nodes.pop(req.rid, None)
        if node is not None and node.parent is not None:
            node.parent.children.remove(node)
    req.set_finish_with_abort(_EMPTY)


def _refuse(scheduler: Scheduler, request: TokenizedGenerateReqInput, message: str) -> None:
    from sglang.srt.managers.schedule_batch import Req

    params = type(request.sampling_params)()  # its own may be what it is refused for
    params.normalize(None)
    refused = Req(
        request.rid,
        request.input_text,
        request.input_ids,
        params,
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=request.http_worker_ipc,
    )
    refused.tokenizer = scheduler.tokenizer
    refused.set_finish_with_abort(message)
    scheduler.init_req_max_new_tokens(refused)
    scheduler._add_request_to_queue(refused)
