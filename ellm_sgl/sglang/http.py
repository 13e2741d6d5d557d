"""What eLLM adds to SGLang's HTTP process: routes, and a look at each request."""

from __future__ import annotations

from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.ranges import check_finite, shown
from ellm_sgl.sglang.slo import SloFields, check_slos

CONTROL = "ellm/"
"""Prefix of the methods that `state.control` answers in the scheduler."""


def add_routes(*_: Any, **__: Any) -> None:
    """Hook before `launch_server`: `GET /ellm/state`, `GET /ellm/steps`, `POST /ellm/policy`,
    and the SLO fields of requests."""
    if EllmConfig.from_env() is None:
        return
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app = http_server.app
    app.add_middleware(SloFields)

    def manager() -> Any:
        return http_server._global_state.tokenizer_manager

    async def control(method: str, body: dict[str, Any]) -> Any:
        request = DumperControlReqInput(method=CONTROL + method, body=body)
        return (await manager().dumper_control(request))[0]

    @app.get("/ellm/state")
    async def ellm_state(integrity: bool = False) -> Any:
        """eLLM's state, from the scheduler process. Checking the page table, too, takes longer."""
        answer = await control("state", {"integrity": integrity})
        return answer.response[0]

    @app.get("/ellm/steps")
    async def ellm_steps() -> Any:
        """The last measured steps beside what the latency models predicted."""
        answer = await control("steps", {})
        return answer.response

    @app.post("/ellm/policy")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def ellm_policy(body: dict[str, Any] = Body()) -> Any:  # noqa: B008 (FastAPI's way)
        """Ask another policy from now on: {"name": ..., "options": {...}}."""
        wanted = {"options": {}, **body}
        kinds = {name: type(value) for name, value in wanted.items()}
        if kinds != {"name": str, "options": dict}:
            error = f'{shown(body)}: give {{"name": "...", "options": {{...}}}}'
            return JSONResponse({"error": error}, status_code=400)
        try:  # before it is sent on: what is nested too deeply cannot be
            check_finite(wanted["options"], "options")
        except ValueError as problem:
            return JSONResponse({"error": str(problem)}, status_code=400)
        answer = await control("policy", wanted)
        if not answer.success:
            return JSONResponse({"error": answer.error}, status_code=400)
        return wanted


def check_request(manager: Any, request: Any, input_ids: Any) -> None:
    """Hook before `TokenizerManager._validate_one_request`; a ValueError becomes a 400.

    Raises:
        ValueError: the request brings embeddings, which cannot be recomputed from token ids;
            a token id outside of the vocabulary, which on a CPU would end the scheduler; or an
            SLO that makes no sense.
    """
    if EllmConfig.from_env() is None:
        return
    check_slos(getattr(request, "sampling_params", None))
    if getattr(request, "input_embeds", None) is not None:
        raise ValueError("input_embeds: not supported with eLLM; send text or input_ids")
    vocabulary = manager.model_config.vocab_size
    for token_id in input_ids or ():
        if not 0 <= token_id < vocabulary:
            raise ValueError(f"input_ids: {token_id} is not a token id, 0 <= id < {vocabulary}")
