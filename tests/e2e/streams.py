"""Requests under way, as their clients see them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import httpx

from ellm_sgl.client.process import ServerProcess

Bodies = Sequence[dict[str, Any]]


class Streams:
    """Requests under way, and what each has said so far."""

    def __init__(self, server: ServerProcess) -> None:
        self.said: list[list[int]] = []
        self._server = server
        self._rids: list[str] = []
        self._limits: list[int] = []
        self._threads: list[Thread] = []

    def begin(self, bodies: Bodies) -> None:
        """Ask these too."""
        for body in bodies:
            self._rids.append(uuid.uuid4().hex)
            self._limits.append(body["sampling_params"]["max_new_tokens"])
            self.said.append([])
            self._threads.append(Thread(target=self._read, args=(len(self._threads), body)))
            self._threads[-1].start()

    def _read(self, index: int, body: dict[str, Any]) -> None:
        url, body = f"{self._server.url}/generate", body | {"rid": self._rids[index]}
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.said[index] = json.loads(line.removeprefix("data: "))["output_ids"]

    def wait_until_all_speak(self) -> None:
        """And some of their KV is missing."""
        self._until(
            lambda: (
                min(map(len, self.said)) >= 8
                and self._server.state(integrity=False)["uncached_tokens"] > 0
            )
        )

    def settled(self) -> list[list[int]]:
        """What they have said once all that the server has computed has arrived: no step runs."""
        self._until(
            lambda: all(
                len(said) == computed or (computed is None and not thread.is_alive())
                for said, computed, thread in zip(
                    self.said, self._computed(), self._threads, strict=True
                )
            )
        )
        return [list(said) for said in self.said]

    def one_is_complete(self) -> bool:
        return any(len(s) == limit for s, limit in zip(self.said, self._limits, strict=True))

    def _computed(self) -> list[int | None]:
        """Tokens of each, as the server has them; None of those that have ended."""
        url = f"{self._server.url}/ellm/requests"
        rows = httpx.get(url, timeout=60).raise_for_status().json()["requests"]
        tokens = {row["rid"]: row["tokens"] - row["prompt_tokens"] for row in rows}
        return [tokens.get(rid) for rid in self._rids]

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, (self._server.state(), self._computed(), self.said)
            time.sleep(0.05)

    def end(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(300)
        return self.said
