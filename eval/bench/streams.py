"""Requests that decode while something else is measured, and when each of their tokens came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import httpx
import numpy as np

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Outcome, Request, replay
from ellm_sgl.eval.bench.result import MeasurementError

START_S = 400.0


class Streams:
    """In this context all prompts have been computed, and decode; afterwards they are aborted.
    Times are `time.perf_counter`'s.

    Args:
        prompts: token ids.
        tokens: that each may generate: more than what is measured leaves time for.
    """

    def __init__(
        self, server: ServerProcess, prompts: Sequence[tuple[int, ...]], tokens: int
    ) -> None:
        self._server = server
        self._requests = [Request(0.0, prompt, tokens) for prompt in prompts]
        self._began = time.perf_counter()
        self._threads = ThreadPoolExecutor(1)
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._replay = self._threads.submit(
            replay, self._server.url, self._requests, began=self._began
        )
        try:
            self._wait_until_all_run()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_all_run(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            state = self._server.state(integrity=False)
            if state["running"] == len(self._requests) and not state["waiting"]:
                return
            if time.monotonic() > deadline or self._replay.done():
                raise MeasurementError(f"{state['running']} of {len(self._requests)} streams run")
            time.sleep(0.05)

    def __exit__(self, *error: object) -> None:
        while not self._replay.done():
            url = f"{self._server.url}/abort_request"
            httpx.post(url, json={"abort_all": True}, trust_env=False)
            time.sleep(0.1)
        self._threads.shutdown()
        self.outcomes = self._replay.result()

    def gaps(self, begin: float, end: float, whole: bool = False) -> list[float]:
        """Times between two tokens of a stream, in seconds, of which any part lies in this span, or
        all; known after the context.

        Raises:
            MeasurementError: a stream had ended by then.
        """
        found: list[float] = []
        for outcome in self.outcomes:
            at = np.array(outcome.token_s) + self._began
            if not len(at) or at[-1] < end:
                raise MeasurementError("a stream ended too soon: it was to decode meanwhile")
            first, second = at[:-1], at[1:]
            inside = (
                (first >= begin) & (second <= end) if whole else (second > begin) & (first < end)
            )
            found += np.diff(at)[inside].tolist()
        return found
