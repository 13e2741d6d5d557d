"""The same model, prompts and threads through other engines: llama.cpp (llama-cpp-python's batch
calls, without HTTP; where it is not installed it is left out, and said), stock SGLang with
PyTorch's attention, and eLLM with all KV cached, the latter two over HTTP with streams."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import click

from ellm_sgl.client.process import DEMO_MODEL, ServerProcess, has_tokenizer
from ellm_sgl.client.replay import Request
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.peers import llama_cpp
from ellm_sgl.eval.bench.peers.rates import Rates, Work
from ellm_sgl.eval.bench.result import SAME_OUTPUT, Column, Paired, Result, Taken
from ellm_sgl.eval.bench.scenario import (
    Scenario,
    Setting,
    check_threads,
    option,
    rounds_option,
)
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.latency import ModelShape

ELLM, STOCK, LLAMA = "eLLM", "torch_native", "llama.cpp"
HERE = (ELLM, STOCK) if llama_cpp.lacking() else (ELLM, STOCK, LLAMA)
LOADS = ("1x128", "8x128", "24x128", "1x4096", "4x4096")
BYTES = {"float32": 4, "bfloat16": 2}
KV_TYPES = {"float32": "float32", "bfloat16": "float16"}
"""Of llama.cpp, as large as ours. In 16 bits it is faster with those that it takes by itself."""
LIMIT_ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """One cell's prompts in one round, and what the machine sustains just then."""

    prompts: loads.Prompts
    read_bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class Peers(Scenario):
    rounds: int = rounds_option(3)
    model_path: str = option(
        str(DEMO_MODEL), about="A local Llama.  [default: the demo's]", show_default=False
    )
    dtype: str = option("float32", click.Choice(list(BYTES)), "Of weights and KV.")
    threads: int = option(2, click.IntRange(1, 1024), "Of each engine.")
    output_tokens: int = option(128, click.IntRange(8, 4096), "Of each answer.")
    loads: tuple[str, ...] = option(
        (), None, "Requests at once, times tokens of each prompt.", flag="--load", multiple=True,
        metavar="NxTOKENS", text=LOADS,
    )  # fmt: skip
    only: tuple[str, ...] = option(
        (), click.Choice([ELLM, STOCK, LLAMA]), "Only these.", flag="--server", multiple=True
    )

    cell_heading, cell_form = "load", "{} x {:,}"
    against: ClassVar = dict.fromkeys(HERE[1:], ELLM)
    reference = ELLM
    columns = (
        Column("decode\ntokens/s", "decode", "{:,.1f}"),
        Paired("eLLM,\nof it", "decode", inverse=True),
        Column("reading,\nof what memory allows", "read_share", "{:.2f}"),
        Column("prefill\ntokens/s", "prefill"),
        Paired("eLLM,\nof it", "prefill", inverse=True),
        Column("products,\nof PyTorch's rate", "multiply_share", "{:.2f}"),
    )

    def check(self) -> None:
        longest = max(tokens for _, tokens in self.cells()) + self.output_tokens
        if longest > (most := self._context):
            raise ConfigError(
                f"prompt and answer of {longest} tokens: this model's context is {most}; give "
                "--load with shorter prompts"
            )
        check_threads(self.threads)
        if LLAMA in self.only and (lacking := llama_cpp.lacking()):
            raise ConfigError(f"--server llama.cpp: install {' and '.join(lacking)} first")

    @cached_property
    def shape(self) -> ModelShape:
        return read_model(Path(self.model_path) / "config.json")

    @cached_property
    def _context(self) -> int:
        config = json.loads((Path(self.model_path) / "config.json").read_text())
        return int(config["max_position_embeddings"])

    @property
    def _names(self) -> Sequence[str]:
        return [name for name in HERE if name in (self.only or HERE)]

    def starters(self) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        tokens = max(n * (p + self.output_tokens) for n, p in self.cells())
        room = tokens + tokens // 8 + 1024
        model = ("--model-path", self.model_path, "--dtype", self.dtype)
        bare = () if has_tokenizer(self.model_path) else ("--skip-tokenizer-init",)
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        starters: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
            ELLM: loads.starter(
                "--ellm-policy", "fcfs", "--ellm-device-kv-tokens", room,
                model=(*model, *bare), environment=threads,
            ),
            STOCK: loads.starter(
                "--max-total-tokens", room, model=(*model, *bare),
                environment={**threads, "SGLANG_PLUGINS": "ellm_cpu"},
            ),
            LLAMA: self._llama,
        }  # fmt: skip
        return {name: starters[name] for name in self._names}

    @contextlib.contextmanager
    def _llama(self) -> Iterator[llama_cpp.LlamaCpp]:
        import torch

        from ellm_sgl.eval.bench.peers import gguf_model

        with tempfile.TemporaryDirectory(prefix="ellm-sgl-") as folder:
            file = Path(folder) / "model.gguf"
            gguf_model.write(Path(self.model_path), file, getattr(torch, self.dtype))
            with llama_cpp.LlamaCpp(file, self.threads, KV_TYPES[self.dtype]) as engine:
                yield engine

    def cells(self) -> tuple[tuple[int, int], ...]:
        return tuple(_load(text) for text in self.loads or LOADS)

    def load(self, cell: tuple[int, int], seed: int) -> Load:
        import torch

        from ellm_sgl.kernels.bench import machine_limits

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        limits = machine_limits(LIMIT_ROUNDS)
        torch.set_num_threads(before)
        prompts = loads.draw_prompts((cell, seed), *cell)
        return Load(prompts, 1e9 * limits["read"], 1e9 * limits[f"multiply {self.dtype}"])

    def measure(self, server: Any, setting: Setting, load: Load) -> Taken:
        tokens, prompts = self.output_tokens, load.prompts
        if isinstance(server, ServerProcess):
            outcomes = loads.replayed(server, [Request(0.0, p, tokens) for p in prompts])
            rates = Rates.of_outcomes(outcomes)
            outputs = [outcome.output_ids for outcome in outcomes]
        else:
            found = server.generate(prompts, tokens)
            rates, outputs = Rates.of_generated(prompts, found), found.outputs
        count, length = len(prompts), len(prompts[0])
        work = Work.of(self.shape, count, length, tokens, BYTES[self.dtype])
        steps_per_s, prompts_per_s = rates.decode / count, rates.prefill / (count * length)
        figures = {
            "decode": rates.decode,
            "prefill": rates.prefill,
            "read_share": steps_per_s * work.decode_bytes / load.read_bytes_per_s,
            "multiply_share": prompts_per_s * work.prefill_flops / load.flops,
        }
        return Taken(figures, outputs)

    def notes(self, result: Result) -> list[str]:
        told = []
        # In 16 bits near ties fall otherwise.
        if self.dtype == "float32" and self.reference in result.settings:
            for name in (n for n in self._names if n != self.reference):
                same = [s.figures[SAME_OUTPUT] for s in result.samples if s.setting == name]
                told.append(f"answers of {name} that are eLLM's: {sum(same) / len(same):.0%}")
        if (lacking := llama_cpp.lacking()) and not self.only:
            told.append(f"llama.cpp was left out: {' and '.join(lacking)} not installed")
        return told

    def plot(self, result: Result, figure: Any) -> None:
        """Decode and prefill rates by load, a bar for each engine."""
        cells = self.cells()
        width = 0.8 / len(self._names)
        for panel, rate in zip(figure.subplots(2, 1), ("decode", "prefill"), strict=True):
            for number, name in enumerate(self._names):
                places = [at + number * width for at in range(len(cells))]
                values = [result.median(cell, name, rate) for cell in cells]
                panel.bar(places, values, width, label=name, align="edge")
            panel.set_xticks([at + 0.4 for at in range(len(cells))], map(self.title, cells))
            panel.set_ylabel(f"{rate}, tokens/s")
        panel.legend()
        figure.set_size_inches(8, 7)


def _load(text: str) -> tuple[int, int]:
    """
    Raises:
        ConfigError: it is not as `8x128`.
    """
    requests, _, tokens = text.partition("x")
    if not (requests.isdecimal() and tokens.isdecimal() and int(requests) and int(tokens)):
        raise ConfigError(f"--load {text}: give requests and tokens, as 8x128")
    return int(requests), int(tokens)
