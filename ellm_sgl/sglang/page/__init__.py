"""The live page at `/ellm/`: three files, served as they are.

They need nothing from outside, and the browser is told to load nothing from there. All that the
page shows it asks `/ellm/state` and `/ellm/requests` for, once a second while somebody looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def add_page(routes: Any) -> None:
    """Routes for the page's files and for the names of the policies that it offers.

    Args:
        routes: the router that they are added to.
    """
    from fastapi.responses import FileResponse

    from ellm_sgl.policies.registry import installed

    def serve(path: str, file: str, kind: str) -> None:
        @routes.get(f"/ellm/{path}", include_in_schema=False)
        async def ellm_page() -> Any:
            return FileResponse(FOLDER / file, media_type=kind, headers=HEADERS)

    for path, (file, kind) in FILES.items():
        serve(path, file, kind)

    @routes.get("/ellm/policies")
    async def ellm_policies() -> list[str]:
        """Names of the policies that a server may be switched to."""
        return list(installed())
