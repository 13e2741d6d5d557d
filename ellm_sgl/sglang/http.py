"""What eLLM adds to SGLang's HTTP process: routes."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.config.ranges import check_finite, shown
from ellm_sgl.sglang import enabling
from ellm_sgl.sglang.control_routes import ControlRoutes
from ellm_sgl.sglang.keep_alive import KeepAlive
from ellm_sgl.sglang.page import OpenFiles, add_page
from ellm_sgl.sglang.queue_full import QueueFull
from ellm_sgl.sglang.replicas import (
    Answer,
    all_of,
    ask_replicas,
    error_of,
    keeps_weights,
    one_of,
)
from ellm_sgl.sglang.slo import SloFields
from ellm_sgl.sglang.versions import adapter

LOOK_S = 0.5
"""So long what requests do is not asked again: it takes the scheduler milliseconds."""


class Recent:
    """An answer that is asked for anew once it is `LOOK_S` old, however many want to know."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._answer: Any = None
        self._at_s = -math.inf

    async def answer(self) -> Any:
        async with self._asking:
            if time.monotonic() >= self._at_s + LOOK_S:
                self._answer = await self._ask()
                self._at_s = time.monotonic()
            return self._answer


def serve_routes(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """Hook after `TokenizerManager.__init__`: note whether eLLM is on here; and where this process
    serves HTTP, it serves eLLM's routes too. Whoever serves HTTP has imported SGLang's module for
    it by then."""
    enabling.note(manager)
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if http_server is None or EllmConfig.from_env() is None:
        return
    if not getattr(http_server.app.state, "ellm", False):
        http_server.app.state.ellm = True
        resolved = adapter().resolved(manager.server_args)
        records = getattr(resolved, "expert_distribution_recorder_mode", None) is not None
        keeps = functools.partial(keeps_weights, manager)
        control = functools.partial(
            ControlRoutes, records=records, ranks=resolved.tp_size, keeps_weights=keeps
        )
        _wrap(http_server.app, control)
        if resolved.max_queued_requests is not None:
            _wrap(http_server.app, QueueFull)
        add_routes(http_server)


def _wrap(app: Any, *middlewares: Any) -> None:
    """Around the routes, the first outermost, inside all of SGLang's: so these get bodies that it
    has unpacked, and what they answer has the headers of all its answers (CORS)."""
    from starlette.middleware import Middleware

    assert app.middleware_stack is None, "it serves already"
    app.user_middleware += [Middleware(each) for each in middlewares]


def open_page(_: Any, app: Any, *, api_key: str | None, **__: Any) -> None:
    """Hook after `add_api_key_middleware`: what is added later is asked first, so this is where
    a browser without a key can get the page that asks for it."""
    if api_key and getattr(app.state, "ellm", False):
        app.add_middleware(OpenFiles)


def add_routes(http_server: Any) -> None:
    """`GET /ellm/state`, `/ellm/steps`, `/ellm/requests`, `POST /ellm/policy`, the page that shows
    them (`page.py`), and the SLO fields of requests.

    Args:
        http_server: SGLang's module of that name.
    """
    from fastapi import Body, HTTPException
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app = http_server.app
    _wrap(app, KeepAlive, SloFields)
    routes = plain_router()

    async def control(method: str, body: dict[str, Any]) -> list[Answer]:
        return await ask_replicas(http_server._global_state.tokenizer_manager, method, body)

    async def look(method: str, body: dict[str, Any]) -> list[Answer]:
        """What the schedulers answer; a 500 where one cannot: its log says why."""
        answers = await control(method, body)
        if error := error_of(answers):
            raise HTTPException(500, error)
        return answers

    seen_of_late = Recent(lambda: look("requests", {}))

    @routes.get("/ellm/state")
    async def ellm_state(integrity: bool = False) -> Any:
        """eLLM's state, from the scheduler process. Checking the page table, too, takes longer."""
        return one_of(await look("state", {"integrity": integrity}))

    @routes.get("/ellm/steps")
    async def ellm_steps() -> Any:
        """The last measured steps beside what the latency models predicted."""
        return all_of(await look("steps", {}))

    @routes.get("/ellm/requests")
    async def ellm_requests() -> Any:
        """Requests with what of each is cached, the last decisions, and what steps do of late."""
        return one_of(await seen_of_late.answer())

    add_page(routes)

    @routes.post("/ellm/policy")
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
        if error := error_of(await control("policy", wanted)):
            return JSONResponse({"error": error}, status_code=400)
        return wanted

    # Not as a router: SGLang looks for what the admin key protects among the routes themselves.
    app.router.routes.extend(routes.routes)


def plain_router() -> Any:
    """A router whose routes say in one line what a request lacks. SGLang would tell it in several,
    with the file that its own source is in."""
    from fastapi import APIRouter
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastapi.routing import APIRoute

    class PlainRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Any], Coroutine[Any, Any, Any]]:
            handle = super().get_route_handler()

            async def answer(request: Any) -> Any:
                try:
                    return await handle(request)
                except RequestValidationError as problem:
                    return JSONResponse({"error": _told(problem.errors())}, status_code=400)

            return answer

    return APIRouter(route_class=PlainRoute)


def _told(problems: Sequence[dict[str, Any]]) -> str:
    """What pydantic found, the first of it: where, the value, and what it should be."""
    first = problems[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {shown(first.get('input'))}: {first['msg']}"
