"""Routes on SGLang's HTTP server."""

from __future__ import annotations

from typing import Any

from ellm_sgl.config import EllmConfig


def add_routes(*_: Any, **__: Any) -> None:
    """Hook before `launch_server`: `GET /ellm/state`."""
    if EllmConfig.from_env() is None:
        return
    from sglang.srt.entrypoints import http_server

    @http_server.app.get("/ellm/state")  # type: ignore[misc]
    async def ellm_state() -> dict[str, Any]:
        """eLLM's state, from the scheduler process."""
        states = await http_server._global_state.tokenizer_manager.get_internal_state()
        state: dict[str, Any] = states[0]["ellm"]
        return state
