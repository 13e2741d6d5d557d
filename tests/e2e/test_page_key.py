"""The page of a server that has an API key."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from ellm_sgl.client.process import DEMO_ARGUMENTS, ServerProcess
from tests.e2e import browser
from tests.e2e.browser import ARTIFACTS
from tests.servers import STRICT

pytestmark = pytest.mark.slow

API_KEY = "for those who ask"


def test_whoever_holds_the_api_key_has_the_page(tmp_path: Path) -> None:
    """The browser gets the page without it; the page asks for it, once a tab."""
    if (problem := browser.lacking()) is not None:
        pytest.skip(problem)
    arguments = [*DEMO_ARGUMENTS, "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", "2400",
                 "--api-key", API_KEY]  # fmt: skip
    with (
        ServerProcess(arguments, STRICT) as server,
        browser.chromium(tmp_path / "log") as window,
    ):
        page, asks = f"{server.url}/ellm/", "return !document.getElementById('lock').hidden"
        live = "return document.getElementById('link').dataset.state === 'live'"
        window.open(page)
        window.wait(asks)
        assert window.run("return document.activeElement.id") == "api-key"
        said = "return document.getElementById('lock-outcome').textContent"
        for guess in ("a guess", "schlüssel"):
            window.run("document.getElementById('api-key').select()")
            window.press(guess, "Enter")
            assert window.wait(said) == "The server does not take this key."
        window.requested()
        time.sleep(2.5)
        assert window.requested() == [], "nothing is asked for without a key"
        window.screenshot(ARTIFACTS / "page-key.png")
        window.run("document.getElementById('api-key').select()")
        window.press(API_KEY, "Enter")
        window.wait(live)
        assert not window.run(asks)
        tier = "return document.getElementById(arguments[0]).checkVisibility()"
        assert window.run(tier, "device") and not window.run(tier, "host-tier"), "it has none"
        legends = "return [...document.querySelectorAll('.legend .of-host')].map(e => e.hidden)"
        assert window.run(legends) == [True, True]
        window.log("browser")
        window.open(page)
        window.wait(live)
        window.wait("return document.getElementById('policy').options.length > 1")
        window.tab_to("pool")
        window.run("document.getElementById('pool').select()")
        window.press("1600", "Enter")
        window.wait("return document.getElementById('outcome').textContent.includes('to 1,600')")
        bearer = {"Authorization": f"Bearer {API_KEY}"}
        state = httpx.get(f"{page}state", headers=bearer, timeout=60).raise_for_status().json()
        assert state["resize"]["wanted_tokens"] == 1600
        assert [entry for entry in window.log("browser") if entry["level"] != "DEBUG"] == []
        assert window.run("return localStorage.length + document.cookie.length") == 0
        window.call("/window", handle=window.call("/window/new", type="tab")["handle"])
        window.open(page)
        window.wait(asks)
