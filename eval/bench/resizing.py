"""A server's pool, brought to other sizes while Linux is asked what memory the server has."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.resident import Resident
from ellm_sgl.eval.bench.result import MeasurementError

NEAR = 1 / 64
"""Of a change of the pool's memory, that counts as all of it: what the process has besides changes,
too."""
LOOK_S = 0.0005
LONGEST_S = 60.0


@dataclass(frozen=True)
class Change:
    """Of a pool's size; times by `time.perf_counter`."""

    begin: float
    """When it was asked for,"""
    end: float
    """and when the process had the memory, or had it no more."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Pool:
    """The pool of a server on one rank, of which all that it has was written to."""

    def __init__(self, server: ServerProcess) -> None:
        state = server.state(integrity=False)
        self.server = server
        self.resident = Resident(server.pid)
        self.reserved: int = state["device_bytes_reserved"]
        self._token_bytes = self.reserved / state["resize"]["most_tokens"]
        self.tokens: int = state["resize"]["wanted_tokens"]

    def change(self, tokens: int) -> Change:
        """Bring it to so many tokens, and wait until it is there.

        Raises:
            MeasurementError: it does not come there.
        """
        less = tokens < self.tokens
        nbytes = round((tokens - self.tokens) * self._token_bytes * (1 - NEAR))
        wanted = self.resident.bytes() + nbytes
        with ThreadPoolExecutor(1) as asking:
            begin = time.perf_counter()
            asked = asking.submit(self.server.adjust, ellm_device_kv_tokens=tokens)
            has = self.resident.bytes()
            while (has > wanted) if less else (has < wanted):
                if time.perf_counter() > begin + LONGEST_S:
                    raise MeasurementError(f"{has:,} bytes after {LONGEST_S:g} s, not {wanted:,}")
                time.sleep(LOOK_S)
                has = self.resident.bytes()
            end = time.perf_counter()
            asked.result()
        outcome = self.server.state(integrity=False)["resize"]["outcome"]
        if outcome != "applied":
            raise MeasurementError(f"{tokens} tokens of KV: {outcome}")
        self.tokens = tokens
        return Change(begin, end)

    def committed(self) -> int:
        """Bytes that it has, as the server says,"""
        return int(self.server.state(integrity=False)["device_bytes_committed"])

    def held(self) -> int:
        """and as Linux does."""
        return self.resident.of_range(self.reserved)
