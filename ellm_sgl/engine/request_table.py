"""What the control loop remembers of each request, in columns ready for a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ellm_sgl.engine.answers import Answers
from ellm_sgl.policies import EndedRequest, Requests
from ellm_sgl.policies.lengths import OutputLengths

Entries = npt.NDArray[np.int64]
NO_ENTRIES: Entries = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Arrival:
    """What is known of a request when it arrives. Lengths in tokens, times in seconds."""

    tokens: int
    """Prompt, and output so far (of a request that was retracted)."""
    prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    priority: int
    tpot_slo_s: float
    ttft_slo_s: float


_OF_ARRIVAL = tuple(field.name for field in dataclasses.fields(Arrival))
_OURS = (
    "request_id", "waiting_since_s", "answered_s", "first_token_s", "last_token_s", "first_length",
    "ended",
)  # fmt: skip
"""Columns; times (`_s`) are float64, the others int64."""


class Ended(NamedTuple):
    """What was measured of a request that has ended."""

    priority: int
    tpot_s: float
    """Average time per output token; nan before the second."""
    ttft_s: float
    """Time to the first token."""
    tpot_slo_s: float
    ttft_slo_s: float


class RequestTable:
    """One row per request the server knows; a row's number is its entry.

    Static columns are written once, when a request arrives: a decode iteration with 1,000
    requests waiting gathers them with a few array operations instead of visiting each request.

    Args:
        first_id: `request_id` of the first one.
    """

    def __init__(self, first_id: int = 1) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(64, np.float64 if name.endswith("_s") else np.int64)
            for name in (*_OF_ARRIVAL, *_OURS)
        }
        self._free = list(range(63, -1, -1))
        self._ids = count(first_id)
        self.answers = Answers()
        """Those that have ended; the simulator may put others in their place."""

    def add(self, arrival: Arrival, now_s: float) -> int:
        """Take note of a request that begins to wait; returns its entry."""
        if not self._free:
            self._grow()
        entry = self._free.pop()
        column = self._columns
        for name in _OF_ARRIVAL:
            column[name][entry] = getattr(arrival, name)
        column["request_id"][entry] = next(self._ids)
        column["waiting_since_s"][entry] = now_s
        column["answered_s"][entry] = np.nan
        column["first_token_s"][entry] = np.nan
        column["last_token_s"][entry] = np.nan
        column["ended"][entry] = 0
        return entry

    def end(self, entry: int, output_tokens: int, aborted: bool) -> EndedRequest:
        """A request has ended: learn from its length. Its entry stays until it is removed."""
        column = self._columns
        column["ended"][entry] = 1
        if output_tokens:
            bound = int(column["max_new_tokens"][entry])
            # The last token has no KV: lengths are counted as of requests that run. Who is aborted
            # makes room as who ends does, and a client that cuts answers off will do so again.
            kind = int(column["priority"][entry])
            self.answers.ended(output_tokens - 1, kind, cut_off=output_tokens >= bound)
        return EndedRequest(int(column["request_id"][entry]), output_tokens, aborted)

    def measured(self, entry: int, now_s: float) -> Ended:
        """Of a request that ends now. If it was never seen to run, its only token came now."""
        column = self._columns
        answered_s = column["answered_s"][entry]
        came_s = now_s if np.isnan(answered_s) else answered_s
        return Ended(
            priority=int(column["priority"][entry]),
            tpot_s=float(self._tpot(entries_array([entry]))[0]),
            ttft_s=float(came_s - column["arrival_s"][entry]),
            tpot_slo_s=float(column["tpot_slo_s"][entry]),
            ttft_slo_s=float(column["ttft_slo_s"][entry]),
        )

    def remove(self, entry: int) -> EndedRequest | None:
        """A request has left the server, and its entry is free. One that has not ended was aborted:
        this is returned."""
        column, ended = self._columns, None
        if not column["ended"][entry]:
            generated = int(column["tokens"][entry] - column["prompt_tokens"][entry])
            ended = self.end(entry, generated, aborted=True)
        self._free.append(entry)
        return ended

    def lengths(self, running: Requests) -> OutputLengths:
        """What is known of output lengths, these requests' included."""
        generated = running.tokens - running.prompt_tokens
        return self.answers.known(generated, running.priority)

    def request_ids(self, entries: Entries) -> npt.NDArray[np.int64]:
        """Ids of these requests; they grow with arrival."""
        ids: npt.NDArray[np.int64] = self._columns["request_id"][entries]
        return ids

    def wait_again(self, entry: int, tokens: int, now_s: float) -> None:
        """A running request was retracted; it keeps its output and its first token's time."""
        self._columns["tokens"][entry] = tokens
        self._columns["waiting_since_s"][entry] = now_s

    def decoded(self, entries: Entries, lengths: npt.NDArray[np.int64], now_s: float) -> None:
        """These requests have got a token each; `lengths` counts it."""
        column = self._columns
        first = entries[np.isnan(column["first_token_s"][entries])]
        # Where a decision stood nobody looked when the first token came, with the prompt.
        column["first_token_s"][first] = column["answered_s"][first] = now_s
        column["last_token_s"][entries] = now_s
        column["tokens"][entries] = lengths
        column["first_length"][first] = column["tokens"][first]

    def waiting(self, entries: Entries, now_s: float) -> Requests:
        """Requests that wait, as a policy sees them."""
        return self.prefilling(entries, 0, now_s)

    def prefilling(self, entries: Entries, uncached: int, now_s: float) -> Requests:
        """Requests whose prompts are computed, as a policy sees them, each to lack the KV of so
        many tokens."""
        column = self._columns
        zeros = np.zeros(len(entries), np.int64)
        waited = now_s - column["waiting_since_s"][entries]
        tokens = column["tokens"][entries]
        return self._requests(entries, tokens, zeros, zeros + uncached, zeros, waited)

    def running(
        self,
        entries: Entries,
        lengths: npt.NDArray[np.int64],
        shared: npt.NDArray[np.int64],
        uncached: npt.NDArray[np.int64],
        on_host: npt.NDArray[np.int64],
        now_s: float,
    ) -> Requests:
        """Requests that decode, as a policy sees them. Lengths, in tokens, are the caller's, and
        so are the shared, the uncached and, of these, those on the host."""
        column, last_s = self._columns, self._columns["last_token_s"]
        # Of those seen for the first time the first token has just come, with the prompt.
        new = np.isnan(last_s[entries])
        newly = entries[new]
        last_s[newly] = column["answered_s"][newly] = column["first_token_s"][newly] = now_s
        column["tokens"][newly] = column["first_length"][newly] = lengths[new]
        waited = now_s - last_s[entries]
        return self._requests(entries, lengths, shared, uncached, on_host, waited)

    def _requests(
        self,
        entries: Entries,
        tokens: npt.NDArray[np.int64],
        shared: npt.NDArray[np.int64],
        uncached: npt.NDArray[np.int64],
        on_host: npt.NDArray[np.int64],
        waited: npt.NDArray[np.float64],
    ) -> Requests:
        column = self._columns
        arrays = {
            "request_id": column["request_id"][entries],
            "tokens": tokens,
            "prompt_tokens": column["prompt_tokens"][entries],
            "max_new_tokens": column["max_new_tokens"][entries],
            "shared_tokens": shared,
            "uncached_tokens": uncached,
            "uncached_on_host": on_host,
            "arrival_s": column["arrival_s"][entries],
            "waited_s": waited,
            "priority": column["priority"][entries],
            "tpot_slo_s": column["tpot_slo_s"][entries],
            "ttft_slo_s": column["ttft_slo_s"][entries],
            "tpot_s": self._tpot(entries),
        }
        for array in arrays.values():
            array.flags.writeable = False
        return Requests(**arrays)

    def _tpot(self, entries: Entries) -> npt.NDArray[np.float64]:
        """Measured average time per output token, in seconds; nan before the second token."""
        column = self._columns
        decoded = column["tokens"][entries] - column["first_length"][entries]
        spent = column["last_token_s"][entries] - column["first_token_s"][entries]
        return np.where(decoded > 0, spent / np.maximum(decoded, 1), np.nan)

    def _grow(self) -> None:
        size = len(self._columns["request_id"])
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros_like(column)])
        self._free = list(range(2 * size - 1, size - 1, -1))


def entries_array(entries: Sequence[int]) -> Entries:
    return np.fromiter(entries, np.int64, len(entries))
