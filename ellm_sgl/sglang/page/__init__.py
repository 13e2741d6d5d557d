"""The live page at `/ellm/`: three files, served as they are.

They need nothing from outside, and the browser is told to load nothing from there. All that the
page shows it asks `/ellm/state` and `/ellm/requests` for, once a second while somebody looks.

A browser that opens a page sends no key with it. Where SGLang asks for one, the files are therefore
for everybody: there is nothing secret in them. What they ask for is behind SGLang's check like
all else, and the page has a field for the key.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.slo import route

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/ellm/"
FOLDER = Path(__file__).parent
FILES = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
"""By their names below `/ellm/`: file and type."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _answer(name: str) -> Response:
    from starlette.responses import FileResponse

    file, kind = FILES[name]
    return FileResponse(FOLDER / file, media_type=kind, headers=HEADERS)


def add_page(routes: Any) -> None:
    """Routes for the page's files and for the names of the policies that it offers.

    Args:
        routes: the router that they are added to.
    """
    from ellm_sgl.policies.registry import installed

    def serve(name: str) -> None:
        @routes.get(f"{PREFIX}{name}", include_in_schema=False)
        async def ellm_page() -> Any:
            return _answer(name)

    for name in FILES:
        serve(name)

    @routes.get("/ellm/policies")
    async def ellm_policies() -> list[str]:
        """Names of the policies that a server may be switched to."""
        return list(installed())


class OpenFiles:
    """ASGI middleware before SGLang's check of keys: answers with the page's files itself, and lets
    nothing else past the check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        asks = scope["type"] == "http" and scope["method"] == "GET"
        answer = _open(route(scope)) if asks else None
        return (answer or self._app)(scope, receive, send)


def _open(path: str) -> Response | None:
    """What there is at a path without a key."""
    from starlette.responses import RedirectResponse

    if path == PREFIX.rstrip("/"):
        return RedirectResponse(PREFIX.lstrip("/"))  # from here, whatever a proxy has before it
    name = path.removeprefix(PREFIX)
    return _answer(name) if path.startswith(PREFIX) and name in FILES else None
