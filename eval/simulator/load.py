"""What a simulation is asked to serve, what it remembers of each request, and its time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import FloatArray, IntArray, Trace


@dataclass(frozen=True, eq=False)
class Load:
    """Requests in columns, in the order of their arrival."""

    at_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    """Tokens that each will generate; at least 1."""
    max_new_tokens: IntArray
    """Tokens that each says it may generate: what a server may plan with."""
    priority: IntArray
    tpot_slo_s: FloatArray
    ttft_slo_s: FloatArray

    def __len__(self) -> int:
        return len(self.at_s)

    @staticmethod
    def of(
        trace: Trace,
        max_new_tokens: int | None = None,
        tpot_slo_s: float = math.inf,
        ttft_slo_s: float = math.inf,
        priority: int = 0,
    ) -> Load:
        """A trace's requests.

        Args:
            max_new_tokens: what every request says (more, if it will generate more): the server
                does not know output lengths. None: it knows them exactly.
            tpot_slo_s: of every request; inf: none.
            ttft_slo_s: likewise.
            priority: of every request; larger is more urgent.
        """
        output = trace.output_tokens
        said = output if max_new_tokens is None else np.maximum(output, max_new_tokens)
        count = len(trace)
        return Load(
            trace.at_s, trace.prompt_tokens, output, said, np.full(count, priority),
            np.full(count, tpot_slo_s), np.full(count, ttft_slo_s),
        )  # fmt: skip

    @staticmethod
    def together(*loads: Load) -> Load:
        """The requests of all of these, by arrival."""
        columns = {n: np.concatenate([getattr(load, n) for load in loads]) for n in vars(loads[0])}
        order = np.argsort(columns["at_s"], kind="stable")
        return Load(**{name: column[order] for name, column in columns.items()})


class Progress:
    """How far each request has come. Columns have one entry per request of the load."""

    def __init__(self, load: Load) -> None:
        count = len(load)
        self.kv_tokens = np.zeros(count, np.int64)
        """Tokens whose KV the request has, somewhere; 0 before prefill and after retraction."""
        self.generated = np.zeros(count, np.int64)
        self.first_s = np.full(count, np.nan)
        """When its first token came."""
        self.last_s = np.full(count, np.nan)
        """When its latest token came."""
        self.entry = np.full(count, -1, np.int64)
        """In the loop's request table."""
        self.refused = np.zeros(count, bool)
        """Larger than a server without partial caching can take."""
        self.on_host = np.zeros(count, bool)
        """Its whole KV is in host memory (the whole-request baselines)."""


class VirtualClock:
    """Seconds since the start of a simulation. Called like `time.perf_counter`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
