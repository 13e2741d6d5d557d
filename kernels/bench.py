"""Times the CPU attention kernels against their peers and against what the machine can do.

Everything that is compared runs in turn, round after round, the order reversed every other round:
on a machine that others use too, only ratios within a round mean something. Reported are medians.

Peers:
- `torch_native`: what SGLang's backend of that name does: per request, gather K and V token by
  token, then PyTorch's attention (a prompt begins at position 0, so it pads nothing);
- `cpu, t0:1`: the same kernel with the default prefetch, where measuring chose another one;
- `torch_paged`: eLLM's kernel of PyTorch operations;
- `sdpa`: PyTorch's attention alone, on K and V that already lie side by side;
- `read`, `copy`, `multiply`: the machine, with as many threads.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.bench_step import (
    BLOCK_TOKENS,
    LAYERS,
    Run,
    Step,
    StepShape,
    interleave,
    median_ratio,
)
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.cpu.prefetch import DEFAULT
from ellm_sgl.kernels.cpu.tune import Shape, choose_prefetch

LIMIT_BYTES = 1 << 28
MATRIX = 1024
MATRIX_FLOPS = 2 * MATRIX**3
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
    prefetch: str
    """What decode rows were measured to do best with."""
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
    step = step_of(case)
    runs = peers(case, step)
    stream, matrix = torch.ones(LIMIT_BYTES // 4), torch.ones(MATRIX, MATRIX)
    machine: dict[str, Run] = {"read": stream.sum, "multiply": lambda: matrix @ matrix}
    times = interleave({**runs, **machine}, rounds, seconds)
    own = times["cpu"]
    return Result(
        case=case,
        prefetch=str(choose_prefetch(_shape(case))),
        milliseconds={name: 1e3 * statistics.median(t) for name, t in times.items()},
        ratio={name: median_ratio(times[name], own) for name in runs if name != "cpu"},
        read_share=median_ratio(times["read"], own) * step.kv_bytes / LIMIT_BYTES,
        multiply_share=median_ratio(times["multiply"], own) * step.flops / MATRIX_FLOPS,
    )


def machine_limits(rounds: int) -> dict[str, float]:
    """GB/s of reading and of copying (bytes read, not read + written), GFLOP/s of products."""
    source = torch.ones(LIMIT_BYTES // 4)
    target = torch.empty_like(source)
    single, half = (torch.ones(MATRIX, MATRIX, dtype=d) for d in (torch.float32, torch.bfloat16))
    runs: dict[str, Run] = {
        "read": source.sum,
        "copy": lambda: target.copy_(source),
        "multiply float32": lambda: single @ single,
        "multiply bfloat16": lambda: half @ half,
    }
    times = {n: statistics.median(t) for n, t in interleave(runs, rounds, seconds).items()}
    work = {"read": LIMIT_BYTES, "copy": LIMIT_BYTES}
    return {name: work.get(name, MATRIX_FLOPS) / t / 1e9 for name, t in times.items()}


def seconds(run: Run) -> float:
    """Wall time of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def step_of(case: Case) -> Step:
    """The step that a case is measured on."""
    shape = StepShape(
        case.batch, case.context, case.missing, case.heads, case.kv_heads, case.head_dim
    )
    layers = 1 if case.name == "long decode" else LAYERS  # one layer is large enough
    return Step(shape, case.new, TYPES[case.dtype], torch.device("cpu"), layers)


def _shape(case: Case) -> Shape:
    dtype = TYPES[case.dtype]
    return Shape(case.heads, case.kv_heads, case.head_dim, dtype, dtype)


def peers(case: Case, step: Step) -> dict[str, Run]:
    """What is compared in a case, by name; each call computes the same attention."""
    all_rows = slice(0, None)
    prefetch = choose_prefetch(_shape(case))
    kernel = functools.partial(cpu.mixed_attention, prefetch=prefetch)
    runs: dict[str, Run] = {
        "cpu": lambda: step.run(kernel, step.mixed, all_rows),
        "torch_paged": lambda: step.run(torch_paged.mixed_attention, step.mixed, all_rows),
    }
    if case.missing:
        runs["cpu, two passes"] = lambda: step.run_apart(kernel)
        return runs
    if prefetch != DEFAULT:
        runs[f"cpu, {DEFAULT}"] = lambda: step.run(cpu.mixed_attention, step.mixed, all_rows)
    slots = step.units[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
    slots = slots.flatten(1)[:, : case.context]
    # As SGLang's own pool has them: tokens one after the other, [slots, kv_heads, head_dim].
    flat_k, flat_v = step.keys.flatten(0, 1), step.values.flatten(0, 1)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        gqa = case.heads != case.kv_heads
        causal = case.new > 1
        scaled_dot_product_attention(q, k, v, is_causal=causal, scale=step.scale, enable_gqa=gqa)

    def native() -> None:
        for q, own in zip(step.q[: step.new].split(case.new), slots, strict=True):
            sdpa(q, flat_k[own], flat_v[own])

    runs["torch_native"] = native
    if case.new > 1:
        one_k, one_v = flat_k[slots[0]], flat_v[slots[0]]
        runs["sdpa"] = lambda: sdpa(step.q[: case.new], one_k, one_v)
    return runs
