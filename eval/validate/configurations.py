"""What is predicted: loads, memory, policies and modes; and the servers that they need."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from ellm_sgl.client.traces import Trace
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.simulator import MODES

POOL_TOKENS = 16_000
"""KV tokens of an ample device, and of the host tier."""
MAX_RUNNING, CHUNK_TOKENS, LAYER_GROUP = 48, 1024, 1
REQUESTS = 48
SHORTER = 0.12
"""ShareGPT's lengths times this: about 27 tokens in and 160 out."""
ELLM, RECOMPUTE = "ellm", "recompute"


@dataclass(frozen=True)
class Server:
    """One process; recomputing whole requests cannot change its memory while it runs."""

    mode: str
    device_tokens: int = POOL_TOKENS

    def arguments(self, model_path: Path) -> list[str]:
        host = ["--ellm-host-kv-tokens", str(POOL_TOKENS)] if self.mode != RECOMPUTE else []
        policy = ["--ellm-policy", "stock"] if self.mode == ELLM else []
        return [
            "--model-path", str(model_path), "--dtype", "float32", "--skip-tokenizer-init",
            "--ellm-mode", self.mode, *policy, *host,
            "--ellm-device-kv-tokens", str(self.device_tokens),
            "--ellm-layer-group", str(LAYER_GROUP),
            "--max-running-requests", str(MAX_RUNNING),
            "--chunked-prefill-size", str(CHUNK_TOKENS), "--random-seed", "1",
        ]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A load and a memory: what modes are ranked in."""

    device_tokens: int
    load: float
    """Output tokens that arrive per second, as a multiple of what an ample device serves."""

    def trace(self, capacity: float, seed: int) -> Trace:
        """The requests.

        Args:
            capacity: output tokens per second of an ample device.
        """
        trace = paper_workload("sharegpt", REQUESTS, seed, per_second=1.0).scaled(lengths=SHORTER)
        mean = float(trace.output_tokens.mean())
        return trace.scaled(rate=self.load * capacity / mean)

    def __str__(self) -> str:
        return f"{self.device_tokens:,} tokens, load {self.load:g}"


@dataclass(frozen=True)
class Configuration:
    """One thing to predict."""

    cell: Cell
    mode: str = ELLM
    policy: str = "fcfs"
    """Of mode ellm."""
    ratio: float | None = None
    """Of the policy fixed-ratio."""

    @property
    def options(self) -> dict[str, float]:
        return {} if self.ratio is None else {"ratio": self.ratio}

    @property
    def server(self) -> Server:
        return Server(self.mode, *([self.cell.device_tokens] if self.mode == RECOMPUTE else []))

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" {self.ratio:g}"
        return f"{self.policy if self.mode == ELLM else self.mode}{ratio}, {self.cell}"


AMPLE = Cell(POOL_TOKENS, 3.0)
CELLS = tuple(Cell(tokens, load) for tokens, load in itertools.product((2000, 4000), (1.0, 3.0)))
BY_MODE = tuple(Configuration(cell, mode) for cell in CELLS for mode in MODES)
BY_POLICY = (
    Configuration(AMPLE),
    Configuration(CELLS[1], policy="stock"),
    Configuration(CELLS[1], policy="slo-priority"),
    Configuration(CELLS[3], policy="fixed-ratio", ratio=0.25),
)
CONFIGURATIONS = BY_MODE + BY_POLICY
TEACHING = (
    Configuration(Cell(1500, 3.0), policy="fcfs"),
    Configuration(Cell(4000, 1.0), policy="fixed-ratio", ratio=0.4),
)
"""Loads that the machine's profile is fitted to besides `REFERENCE`, with a seed of their own."""
BURST = Configuration(Cell(POOL_TOKENS, 1e6), policy="stock")
"""All at once: what the machine is capable of."""
REFERENCE = Configuration(AMPLE, policy="stock")
"""What is run now and then between configurations, to know how fast the machine is by then."""
