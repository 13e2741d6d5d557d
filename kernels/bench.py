"""Times the CPU attention kernels against their peers and against what the machine can do.

Everything that is compared runs in turn, round after round, the order reversed every other round:
on a machine that others use too, only ratios within a round mean something. Reported are medians.

Peers:
- `torch_native`: what SGLang's backend of that name does: per request, gather K and V token by
  token, then PyTorch's attention (a prompt begins at position 0, so it pads nothing);
- `torch_paged`: eLLM's kernel of PyTorch operations;
- `sdpa`: PyTorch's attention alone, on K and V that already lie side by side;
- `read`, `copy`, `multiply`: the machine, with as many threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.bench_step import BLOCK_TOKENS, LAYERS, Run, Step, StepShape, interleave
from ellm_sgl.kernels.cpu import attention as cpu

LIMIT_BYTES = 1 << 28
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One attention call: `batch` requests of `context` tokens, the last `new` of them new."""

    name: str
    batch: int
    context: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    missing: float = 0.0
    """Share of the blocks before the new tokens that are computed again."""


def cases(largest_context: int) -> tuple[Case, ...]:
    """What is measured: demo-model, Llama-like and multi-head shapes."""
    shapes = ((6, 2, 32, "float32"), (8, 8, 128, "float32"), (32, 8, 128, "bfloat16"))
    found = [Case("decode", 32, 1024, 1, *shape) for shape in shapes]
    context = 32768
    while context <= largest_context:
        found += [Case("long decode", 1, context, 1, *shape) for shape in shapes[1:]]
        context *= 2
    found += [Case("prefill", 1, 2048, 2048, *shape) for shape in shapes]
    found += [Case("mixed", 16, 1024, 1, *shape, missing=0.4) for shape in shapes]
    return tuple(found)


@dataclass(frozen=True)
class Result:
    """One case. Times in ms, medians; ratios to the C++ kernel's time, medians of the rounds."""

    case: Case
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    """Each peer's time over that of the C++ kernel: how many times faster the kernel is."""
    read_share: float
    """KV bytes per second over the read bandwidth of the same round."""
    multiply_share: float
    """Multiply-adds per second over the fp32 matrix-product rate of the same round."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(case: Case, rounds: int) -> Result:
    """Run one case `rounds` times against its peers and the machine."""
    setting = _Setting(case)
    step, runs = setting.step, setting.runs()
    machine = {"read": setting.read, "multiply": setting.multiply}
    times = interleave({**runs, **machine}, rounds, _seconds)
    own = times["cpu"]
    return Result(
        case=case,
        milliseconds={name: 1e3 * statistics.median(t) for name, t in times.items()},
        ratio={name: _median_ratio(times[name], own) for name in runs if name != "cpu"},
        read_share=_median_ratio(times["read"], own) * step.kv_bytes / LIMIT_BYTES,
        multiply_share=_median_ratio(times["multiply"], own) * step.flops / setting.matrix_flops,
    )


def peers(case: Case) -> dict[str, Run]:
    """What is compared in a case, by name; each call computes the same attention."""
    return _Setting(case).runs()


def machine_limits(rounds: int) -> dict[str, float]:
    """GB/s of reading and of copying (bytes read, not read + written), GFLOP/s of products."""
    source = torch.ones(LIMIT_BYTES // 4)
    target = torch.empty_like(source)
    matrices = {name: torch.ones(1024, 1024, dtype=dtype) for name, dtype in TYPES.items()}
    runs: dict[str, Run] = {"read": source.sum, "copy": lambda: target.copy_(source)}
    runs["multiply float32"] = lambda: matrices["float32"] @ matrices["float32"]
    runs["multiply bfloat16"] = lambda: matrices["bfloat16"] @ matrices["bfloat16"]
    times = {n: statistics.median(t) for n, t in interleave(runs, rounds, _seconds).items()}
    work = {"read": LIMIT_BYTES, "copy": LIMIT_BYTES}
    return {name: work.get(name, 2 * 1024**3) / t / 1e9 for name, t in times.items()}


def _seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class _Setting:
    """A case's step, its peers, and the machine's own work."""

    def __init__(self, case: Case) -> None:
        self.case = case
        shape = StepShape(
            case.batch, case.context, case.missing, case.heads, case.kv_heads, case.head_dim
        )
        layers = 1 if case.name == "long decode" else LAYERS  # one layer is large enough
        self.step = Step(shape, case.new, TYPES[case.dtype], torch.device("cpu"), layers)
        self.stream = torch.ones(LIMIT_BYTES // 4)
        self.matrix = torch.ones(1024, 1024)
        self.matrix_flops = 2 * 1024**3

    def read(self) -> None:
        self.stream.sum()

    def multiply(self) -> None:
        _ = self.matrix @ self.matrix

    def runs(self) -> dict[str, Run]:
        case, step, all_rows = self.case, self.step, slice(0, None)
        runs: dict[str, Run] = {
            "cpu": lambda: step.run(cpu.mixed_attention, step.mixed, all_rows),
            "torch_paged": lambda: step.run(torch_paged.mixed_attention, step.mixed, all_rows),
        }
        if case.missing:
            runs["cpu, two passes"] = lambda: step.run_apart(cpu.mixed_attention)
            return runs
        slots = step.units[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        slots = slots.flatten(1)[:, : case.context]
        # As SGLang's own pool has them: tokens one after the other, [slots, kv_heads, head_dim].
        flat_k, flat_v = step.keys.flatten(0, 1), step.values.flatten(0, 1)
        runs["torch_native"] = lambda: self._native(flat_k, flat_v, slots)
        if case.new > 1:
            one_k, one_v = flat_k[slots[0]], flat_v[slots[0]]
            runs["sdpa"] = lambda: self._sdpa(step.q[: case.new], one_k, one_v)
        return runs

    def _native(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        new = self.case.new
        for i, own in enumerate(slots):
            self._sdpa(self.step.q[i * new : (i + 1) * new], keys[own], values[own])

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        gqa = self.case.heads != self.case.kv_heads
        causal = self.case.new > 1
        scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=self.step.scale, enable_gqa=gqa
        )


def _median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
