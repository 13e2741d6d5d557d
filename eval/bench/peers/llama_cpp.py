"""llama.cpp through llama-cpp-python's batch calls, in a process of its own, without HTTP.

    python -m ellm_sgl.eval.bench.peers.llama_cpp FILE.gguf THREADS KV_TYPE

takes lines `{"prompts": [[id, ...], ...], "tokens": n}` and answers each with `Generated` in JSON.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ellm_sgl.eval.bench.result import MeasurementError

PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
BATCH_TOKENS = 2048
"""llama.cpp's own default."""
CACHE_TYPES = {"float32": 0, "float16": 1}
"""ggml's numbers."""
CONTEXT_MULTIPLE = 256
"""llama.cpp rounds a sequence's context up to these."""


def lacking() -> list[str]:
    """Packages that llama.cpp needs here and that are not installed."""
    return [p for module, p in PACKAGES.items() if importlib.util.find_spec(module) is None]


@dataclass(frozen=True)
class Generated:
    """What became of some prompts at once."""

    prefill_s: float
    """Until all have their first token,"""
    decode_s: float
    """and from then on until all have their last."""
    outputs: Sequence[Sequence[int]]


class LlamaCpp:
    """The process that this module is.

    Args:
        model: a GGUF file.
        kv_type: one of `CACHE_TYPES`.
    """

    def __init__(self, model: Path, threads: int, kv_type: str) -> None:
        self._command = [sys.executable, "-m", __name__, str(model), str(threads), kv_type]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # closes what it reads from: it ends

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Generated:
        """Greedy answers of so many tokens each.

        Raises:
            MeasurementError: the process has ended; it has said why on stderr.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise MeasurementError(f"llama.cpp has ended, status {self._process.wait()}")
        return Generated(**json.loads(line))


class _Engine:
    """Within that process."""

    def __init__(self, model: str, threads: int, kv_type: str) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(_say_errors)  # has to live as long as the model
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), of_model)
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {model}")
        self._threads, self._kv_type = threads, CACHE_TYPES[kv_type]
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._logits = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._made_for = 0, 0
        """Sequences, and tokens of each, that the context has room for."""

    def _make_room(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """A context for these and so many tokens of output each, empty, whose memory has been used
        before: each sequence has its own KV, which the library's header advises where none share a
        prefix, and an equal part of the context."""
        sequences, longest = len(prompts), max(map(len, prompts)) + tokens
        room = sequences, -(-longest // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        if self._made_for == room:
            return self._clear()
        if self._context:
            self._api.llama_free(self._context)
        given = self._api.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.n_batch = math.prod(room), sequences, BATCH_TOKENS
        given.n_threads = given.n_threads_batch = self._threads
        given.type_k = given.type_v = self._kv_type
        given.kv_unified = False
        self._context = self._api.llama_init_from_model(self._model, given)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {room[0]} x {room[1]} tokens")
        self._made_for = room
        list(self._prefill(prompts))
        self._clear()

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Generated:
        self._make_room(prompts, tokens)
        began = time.perf_counter()
        outputs = [[token] for token in self._prefill(prompts)]
        first = time.perf_counter()
        for step in range(tokens - 1):
            rows = [
                (output[-1], len(prompt) + step, sequence, True)
                for sequence, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            for output, token in zip(outputs, self._decode(rows), strict=True):
                output.append(token)
        return Generated(first - began, time.perf_counter() - first, outputs)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Iterator[int]:
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for begin in range(0, len(rows), BATCH_TOKENS):
            yield from self._decode(rows[begin : begin + BATCH_TOKENS])

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The next token of each row that asks for one.

        Args:
            rows: token, position, sequence, and whether the next token is wanted.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if (status := self._api.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama_decode: {status}")
        return [self._greedy(i) for i, row in enumerate(rows) if row[3]]

    def _greedy(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._logits,)).argmax())


def _say_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level >= 4:  # ggml's number of errors
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    model, threads, kv_type = sys.argv[1:]
    engine = _Engine(model, int(threads), kv_type)
    for line in sys.stdin:
        print(json.dumps(asdict(engine.generate(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
