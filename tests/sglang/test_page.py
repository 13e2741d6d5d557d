"""The page's files and the routes beside it: keys, headers, and nothing from outside."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from ellm_sgl.sglang import page
from ellm_sgl.sglang.http import add_routes
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

ROUTES = ("/ellm/", "/ellm/page.js", "/ellm/page.css", "/ellm/requests", "/ellm/policies")


def client(**keys: str | None) -> TestClient:
    """Of an application with our routes behind SGLang's own check of keys."""
    from sglang.srt.utils.auth import add_api_key_middleware

    async def dumper_control(request: Any) -> list[Any]:
        return [
            SimpleNamespace(
                success=True, response=[{"replica": 0}, {"asked": request.method}], error=""
            )
        ]

    manager = SimpleNamespace(dumper_control=dumper_control)
    app = FastAPI()
    add_routes(SimpleNamespace(app=app, _global_state=SimpleNamespace(tokenizer_manager=manager)))
    add_api_key_middleware(app, api_key=keys.get("api_key"), admin_api_key=keys.get("admin"))
    return TestClient(app)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("route", ROUTES)
def test_an_api_key_protects_every_route(route: str) -> None:
    served = client(api_key="secret")
    assert served.get(route).status_code == 401
    assert served.get(route, headers=bearer("guess")).status_code == 401
    assert served.get(route, headers=bearer("secret")).status_code == 200


def test_the_admin_key_protects_what_changes_the_server() -> None:
    served, body = client(admin="secret"), {"name": "stock"}
    assert all(served.get(route).status_code == 200 for route in ROUTES)
    assert served.post("/ellm/policy", json=body).status_code == 401
    assert served.post("/ellm/policy", json=body, headers=bearer("secret")).status_code == 200


def test_the_browser_is_told_to_load_nothing_from_outside() -> None:
    served = client()
    for route in ROUTES[:3]:
        policy = served.get(route).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "http" not in policy
    assert served.get("/ellm", follow_redirects=False).headers["location"].endswith("/ellm/")


def test_the_page_names_no_address_and_puts_in_no_markup() -> None:
    for file, _ in page.FILES.values():
        text = (page.FOLDER / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*", "", text, flags=re.MULTILINE), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"<[^>]+ (style|on\w+)=", text), "the browser would refuse it"
