"""Headless Chromium over WebDriver (W3C), as far as tests need it: Debian's `chromium-driver`
answers HTTP, so that no package of bindings is wanted."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ellm_sgl.client.process import hold_port, port_of

ARTIFACTS = Path(__file__).parents[2] / "out"
"""Screenshots stay there."""
CHROMIUM = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--force-color-profile=srgb")  # fmt: skip
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": " ", "Up": "\ue013", "Down": "\ue015"}


def lacking() -> str | None:
    """What is not installed, and how to have it."""
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacks)}: make system" if lacks else None


class Browser:
    """One window.

    Args:
        session: URL of a WebDriver session.
    """

    def __init__(self, session: str) -> None:
        self._http = httpx.Client(base_url=session, timeout=120, trust_env=False)

    def call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value['error']}: {value['message'][:400]}"
        return value

    def open(self, url: str) -> None:
        self.call("/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns."""
        return self.call("/execute/sync", script=script, args=list(arguments))

    def cdp(self, command: str, **params: Any) -> None:
        """A command of Chromium's own protocol."""
        self.call("/goog/cdp/execute", cmd=command, params=params)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=scale, mobile=width < 600)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """The colour scheme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def press(self, *keys: str) -> None:
        """Keys by name, or text."""
        for key in keys:
            typed = KEYS.get(key, key)
            presses = [{"type": kind, "value": c} for c in typed for kind in ("keyDown", "keyUp")]
            self.call("/actions", actions=[{"type": "key", "id": "keys", "actions": presses}])

    def tab_to(self, wanted: str) -> list[str]:
        """What the focus comes by on its way to the element of this id."""
        reached: list[str] = []
        for _ in range(60):
            self.press("Tab")
            reached.append(self.run("return document.activeElement.id"))
            if reached[-1] == wanted:
                return reached
        raise AssertionError(f"the keyboard does not reach {wanted}: {reached}")

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries since the last call: of the "browser" (its console), or its "performance"."""
        found: list[dict[str, Any]] = self.call("/se/log", type=kind)
        return found

    def requested(self) -> list[str]:
        """URLs that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, file: Path) -> None:
        """A picture of the window."""
        file.parent.mkdir(parents=True, exist_ok=True)
        answer = self._http.get("/screenshot").json()["value"]
        file.write_bytes(base64.b64decode(answer))

    def wait(self, script: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """Until `script` returns something true, which this returns."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, script
            time.sleep(0.1)
        return found


@contextmanager
def chromium(log: Path) -> Iterator[Browser]:
    """A browser, ended afterwards.

    Args:
        log: what the driver says goes there.
    """
    held = hold_port()
    port = port_of(held)
    with log.open("wb") as out:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=out, stderr=out)
    session = None
    try:
        session = _session(f"http://127.0.0.1:{port}")
        yield Browser(session)
    finally:
        if session is not None:
            httpx.delete(session, timeout=60, trust_env=False)
        driver.terminate()
        driver.wait()
        held.close()


def _session(driver: str) -> str:
    options = {"args": list(CHROMIUM)}
    wanted: Mapping[str, Any] = {
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    deadline = time.monotonic() + 60
    while True:
        try:
            answer = httpx.post(f"{driver}/session", json={"capabilities": {"alwaysMatch": wanted}},
                                timeout=120, trust_env=False)  # fmt: skip
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.1)
    value = answer.json()["value"]
    assert answer.status_code == 200, value
    return f"{driver}/session/{value['sessionId']}"
