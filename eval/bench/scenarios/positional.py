"""How long a decode step takes at each position of a long context, from a thousand tokens on.

As in section 7.1 of the eLLM paper on CPUs: a step at position p takes e + p·a, e whatever the
position and a for each token attended to; the mean of those up to p e + (p+1)/2·a. A server whose
prefix cache was filled with random KV decodes one request at a time. Reading as much memory as that
request's KV is timed just before, with as many threads. A step is the median of those that the
server measures, TPOT what the client sees. At the end attention at the longest position is compared
with chunked float64.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from ellm_sgl.client.process import DEMO_ARGUMENTS, DEMO_MODEL
from ellm_sgl.client.replay import Request, replay_to_end
from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import MOST_TOKENS
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.filled import FilledServer, prompt
from ellm_sgl.eval.bench.result import Column, MeasurementError, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import (
    Say,
    Scenario,
    Setting,
    check_threads,
    model_option,
    option,
    rounds_option,
)
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.latency import ModelShape

SHORTEST = 1024
QUARTER = 4
"""Positions that lie so far apart are compared."""
DTYPE = "float32"
UNSETTLED = 8
"""First tokens of an answer that do not count."""
READ_BYTES = 1 << 28
READS = 5
SLACK_TOKENS = 8192
"""Of the pool, for answers, and for SGLang's own first requests."""
BUSIEST = 0.9
"""Of the memory that is free, the most that is taken."""


@dataclass(frozen=True)
class Line:
    """t = e + p·a, by least squares of relative deviations. In seconds."""

    e: float
    a: float

    @staticmethod
    def of(positions: list[int], seconds: list[float]) -> Line:
        p, t = np.array(positions, np.float64), np.array(seconds)
        e, a = np.linalg.lstsq(np.stack([1 / t, p / t], 1), np.ones(len(t)), rcond=None)[0]
        return Line(float(e), float(a))

    def at(self, position: float) -> float:
        return self.e + position * self.a

    def mean_up_to(self, position: float) -> float:
        """Of the steps at positions 1 to so many: the paper's t."""
        return self.e + (position + 1) / 2 * self.a


@dataclass(frozen=True)
class Positional(Scenario):
    rounds: int = rounds_option(3)
    model_path: str = model_option()
    longest: int = option(
        1 << 20, click.IntRange(2 * SHORTEST, MOST_TOKENS), "Position, in tokens."
    )
    threads: int = option(2, click.IntRange(1, 1024), "Of the server, and that read memory.")
    output_tokens: int = option(40, click.IntRange(2 * UNSETTLED, 1024), "Steps at each position.")

    cell_heading, cell_form = "position", "{:,}"
    columns = (
        Column("step ms", "step_s", "{:,.2f}", 1e3),
        Column("reading\nits KV ms", "read_s", "{:,.2f}", 1e3),
        Column("step, of\nreading", "of_read", "{:.2f}"),
        Column("TPOT ms", "tpot_s", "{:,.2f}", 1e3),
    )

    def check(self) -> None:
        needed = self._token_bytes * (self.longest + SLACK_TOKENS)
        free = int(BUSIEST * psutil.virtual_memory().available)
        if needed > free:
            raise ConfigError(
                f"--longest {self.longest}: its KV takes {needed:,} bytes, of {free:,} that may be "
                f"taken here; give at most {free // self._token_bytes - SLACK_TOKENS}"
            )
        check_threads(self.threads)

    @cached_property
    def shape(self) -> ModelShape:
        return read_model(Path(self.model_path) / "config.json")

    @property
    def _token_bytes(self) -> int:
        return self.shape.in_elements_of(4).kv_bytes_per_token

    def starters(self) -> Mapping[str, Any]:
        own = Path(self.model_path) == DEMO_MODEL
        context = self.longest + SLACK_TOKENS
        arguments = [
            self.longest, *(DEMO_ARGUMENTS if own else loads.bare_model(self.model_path)),
            "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", context,
            "--context-length", context, "--max-running-requests", 2,
            "--json-model-override-args", json.dumps({"max_position_embeddings": context}),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        return {DTYPE: partial(FilledServer, [*map(str, arguments)], environment)}

    def cells(self) -> tuple[int, ...]:
        return tuple(self._positions())

    def _positions(self) -> Iterator[int]:
        at = SHORTEST
        while at < self.longest:
            yield at
            at *= 2
        yield self.longest

    @cached_property
    def _cached(self) -> tuple[int, ...]:
        return prompt(self.longest)

    def load(self, cell: int, seed: int) -> tuple[int, ...]:
        return self._cached[:cell]

    def warm_up(self, name: str, server: FilledServer) -> None:
        """The prefix cache divides what it was filled with where a prompt ends."""
        for cell in self.cells():
            replay_to_end(server.url, [Request(0.0, self.load(cell, 0), UNSETTLED)])

    def measure(self, server: FilledServer, setting: Setting, load: tuple[int, ...]) -> Taken:
        bandwidth = read_bandwidth(self.threads)
        (outcome,) = replay_to_end(server.url, [Request(0.0, load, self.output_tokens)])
        if not outcome.complete or len(outcome.token_s) != self.output_tokens:
            raise MeasurementError(f"a request of {len(load)} tokens: {outcome.finish}")
        last = self.output_tokens - UNSETTLED
        steps = [s["seconds"] for s in loads.full_steps(server, 1, last)]
        step, read = statistics.median(steps), self._token_bytes * len(load) / bandwidth
        figures = {
            "step_s": step, "read_s": read, "of_read": step / read,
            "ttft_s": outcome.ttft_s, "tpot_s": outcome.tpot_s,
        }  # fmt: skip
        return Taken(figures, (), steps)

    def finish(self, servers: Mapping[str, Any], result: Result, say: Say) -> Mapping[str, Any]:
        from ellm_sgl.eval.bench.attention_error import attention_error

        state = servers[DTYPE].state()
        say("comparing attention with float64")
        shape = self.shape
        error = attention_error(self.longest, shape.heads, shape.kv_heads, shape.head_dim)
        return {"integrity": state["integrity"], "attention_error": error}

    # -- what it says -------------------------------------------------------------------------

    def _line(self, result: Result) -> Line:
        seconds = [result.median(cell, DTYPE, "step_s") for cell in self.cells()]
        return Line.of([*self.cells()], seconds)

    def tables(self, result: Result) -> list[Table]:
        line, rows = self._line(result), []
        for cell in self.cells():
            (row,) = self.rows(result, cell)
            of_fit = result.median(cell, DTYPE, "step_s") / line.at(cell)
            fitted = (f"{line.at(cell) * 1e3:,.2f}", f"{of_fit:.3f}")
            mean = f"{line.mean_up_to(cell) * 1e3:,.2f}"
            rows.append((self.title(cell), *row, *fitted, mean))
        headings = (self.cell_heading, "", *(c.heading for c in self.columns),
                    "e + p·a\nms", "step, of\nthat", "mean up\nto p, ms")  # fmt: skip
        return [Table("", headings, tuple(rows))]

    def notes(self, result: Result) -> list[str]:
        line = self._line(result)
        told = [f"e {line.e * 1e3:.2f} ms, a {line.a * 1e9:.1f} ns per token"]
        if (near := self.longest // QUARTER) in self.cells():
            far_s, near_s = (result.median(p, DTYPE, "step_s") for p in (self.longest, near))
            told.append(f"step at {self.longest:,} over step at {near:,}: {far_s / near_s:.2f}")
        if "attention_error" in result.extra:
            told.append(
                f"attention at {self.longest:,}, largest difference from float64: "
                f"{result.extra['attention_error']:.1e} of the largest output; "
                f"page table: {result.extra['integrity']}"
            )
        return told

    def document(self, result: Result) -> dict[str, Any]:
        line = self._line(result)
        return {**super().document(result), "e_s": line.e, "a_s": line.a, **result.extra}

    def plot(self, result: Result, figure: Any) -> None:
        """Every round's step over the position, the line, and what reading takes."""
        panel, line, cells = figure.subplots(), self._line(result), self.cells()
        for cell in cells:
            values = [1e3 * v for v in result.values(cell, DTYPE, "step_s")]
            panel.plot([cell] * len(values), values, "o", color="C0", alpha=0.6)
        panel.plot(cells, [1e3 * line.at(p) for p in cells], color="C0",
                   label=f"{line.e * 1e3:.1f} ms + p · {line.a * 1e9:.0f} ns")  # fmt: skip
        read = [1e3 * result.median(p, DTYPE, "read_s") for p in cells]
        panel.plot(cells, read, "--", color="C1", label="reading the KV")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(xlabel="position p, tokens", ylabel="decode step, ms")
        panel.legend()
        figure.set_size_inches(8, 5)


def read_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read from memory: the median of a few times."""
    import torch

    data = torch.from_numpy(np.ones(READ_BYTES // 4, np.float32))
    before, seconds = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    for _ in range(READS):
        began = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(before)
    return READ_BYTES / statistics.median(seconds)
