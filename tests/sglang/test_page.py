"""The page's files and the routes beside it: keys, headers, and nothing from outside."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from ellm_sgl.sglang import page
from ellm_sgl.sglang.http import add_routes, open_page
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

FILES = ("/ellm/", "/ellm/page.js", "/ellm/page.css")
ROUTES = (*FILES, "/ellm/state", "/ellm/steps", "/ellm/requests", "/ellm/policies")


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
    app.state.ellm = True
    add_routes(SimpleNamespace(app=app, _global_state=SimpleNamespace(tokenizer_manager=manager)))
    given = {"api_key": keys.get("api_key"), "admin_api_key": keys.get("admin")}
    add_api_key_middleware(app, **given)
    open_page(None, app, **given)
    return TestClient(app)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("route", ROUTES)
def test_an_api_key_protects_all_that_the_page_shows(route: str) -> None:
    """The page itself has nothing to protect, and a field for the key."""
    served, without = client(api_key="secret"), 200 if route in FILES else 401
    assert served.get(route).status_code == without
    assert served.get(route, headers=bearer("guess")).status_code == without
    assert served.get(route, headers=bearer("secret")).status_code == 200


@pytest.mark.parametrize("keys", [{"api_key": "secret"}, {"api_key": "secret", "admin": "other"}])
def test_the_files_are_open_and_nothing_beside_them(keys: dict[str, str]) -> None:
    served = client(**keys)
    for name in FILES:
        assert served.get(name).content == client().get(name).content
        assert served.post(name).status_code == 401
    for path in ("/", "/ellm/x", "/ellm//", "/ellm/page.js/", "/ellm/../ellm/state", "//ellm/",
                 "/ellm/page.js/../state", "/v1/ellm/", "/openapi.json"):  # fmt: skip
        assert served.get(path).status_code == 401, path
    for host in ("a/ellm/?", "a/ellm/page.js?", "a/ellm/#"):
        assert served.get("/ellm/state", headers={"Host": host}).status_code == 401, host


def test_the_page_is_found_below_a_proxys_path() -> None:
    served = client(api_key="secret")
    below = TestClient(served.app, root_path="/a")
    assert below.get("/a/ellm/").content == served.get("/ellm/").content
    assert below.get("/a/ellm/state").status_code == 401


def test_an_api_key_opens_no_page_where_ellm_is_off() -> None:
    app = FastAPI()
    open_page(None, app, api_key="secret", admin_api_key=None)
    assert app.user_middleware == []


def test_the_admin_key_protects_what_changes_the_server() -> None:
    served, body = client(admin="secret"), {"name": "stock"}
    assert all(served.get(route).status_code == 200 for route in ROUTES)
    assert served.post("/ellm/policy", json=body).status_code == 401
    assert served.post("/ellm/policy", json=body, headers=bearer("secret")).status_code == 200


def test_the_browser_is_told_to_load_nothing_from_outside() -> None:
    served = client()
    for route in FILES:
        policy = served.get(route).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "http" not in policy
    for at in (served, client(api_key="secret")):
        assert at.get("/ellm", follow_redirects=False).headers["location"].endswith("ellm/")
        assert at.get("/ellm").content == served.get("/ellm/").content


def test_the_page_names_no_address_and_puts_in_no_markup() -> None:
    for file, _ in page.FILES.values():
        text = (page.FOLDER / file).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*", "", text, flags=re.MULTILINE), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"<[^>]+ (style|on\w+)=", text), "the browser would refuse it"
