"""What eLLM adds to SGLang's HTTP process: a route, and a look at each request."""

from __future__ import annotations

from typing import Any

from ellm_sgl.config import EllmConfig


def add_routes(*_: Any, **__: Any) -> None:
    """Hook before `launch_server`: `GET /ellm/state`."""
    if EllmConfig.from_env() is None:
        return
    from sglang.srt.entrypoints import http_server

    @http_server.app.get("/ellm/state")
    async def ellm_state() -> dict[str, Any]:
        """eLLM's state, from the scheduler process."""
        states = await http_server._global_state.tokenizer_manager.get_internal_state()
        state: dict[str, Any] = states[0]["ellm"]
        return state


def check_request(manager: Any, request: Any, input_ids: Any) -> None:
    """Hook before `TokenizerManager._validate_one_request`; a ValueError becomes a 400.

    Raises:
        ValueError: the request brings embeddings, which cannot be recomputed from token ids, or
            a token id outside of the vocabulary, which on a CPU would end the scheduler.
    """
    if EllmConfig.from_env() is None:
        return
    if getattr(request, "input_embeds", None) is not None:
        raise ValueError("input_embeds: not supported with eLLM; send text or input_ids")
    vocabulary = manager.model_config.vocab_size
    for token_id in input_ids or ():
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"input_ids: {token_id} is not a token id, 0 <= id < {vocabulary}")
