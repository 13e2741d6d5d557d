"""Times one layer's attention of a mixed step on a CUDA device, against FlashInfer and the device.

The step: `batch` requests of `context` tokens decode one token each, and the first r of their
tokens are computed again. Everything compared runs in turn, round after round, the order reversed
every other round; a run is timed by events around several calls. Reported are medians.

- `fused`: eLLM's kernel, one launch, at each δ; it writes the KV too;
- `fused, apart`: the same kernel, recompute rows and decode rows in two launches;
- `flashinfer, apart` and `flashinfer POD`: FlashInfer's prefill followed by its decode, and its
  fused wrapper, both with the recomputed KV already in the pool: less work than eLLM has to do.
"""

from __future__ import annotations

import importlib
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ellm_sgl.kernels.bench_step import BLOCK_TOKENS, Run, Step, StepShape, interleave, median_ratio
from ellm_sgl.kernels.experimental.flashinfer import attention as flashinfer
from ellm_sgl.kernels.experimental.flashinfer.plan import divide

CALLS = 5
"""Calls of a timed run, so that the host is ahead of the device."""
DELTAS = (32, 128, 256, 512, 768, 896, 992)
COPY_BYTES = 1 << 30
MATRIX = 8192


def cases() -> tuple[StepShape, ...]:
    """Llama-2-13B's heads and Llama-3-8B's, over batch, context and r."""
    return tuple(
        StepShape(batch, context, missing, heads, kv_heads)
        for heads, kv_heads in ((40, 40), (32, 8))
        for batch, context in ((8, 1024), (32, 1024), (8, 8192), (2, 32768))
        for missing in (0.0, 0.1, 0.4)
    )


@dataclass(frozen=True)
class Result:
    """One case. Times in ms, medians; ratios of the same round, medians."""

    case: StepShape
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    """Each peer's time over that of the fused kernel at its best δ."""
    best_delta: int
    read_share: float
    """KV bytes per second of the fused kernel over the device's copy bandwidth (read + write)."""
    multiply_share: float
    """Its multiply-adds per second over the bf16 matrix-product rate."""
    largest_difference: float
    """Between the peers' outputs of the decoded tokens and the fused kernel's."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def limits() -> dict[str, float]:
    """GB/s of copying (bytes read and written) and TFLOP/s of bf16 matrix products."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    times = interleave(
        {"copy": lambda: target.copy_(source), "multiply": lambda: a @ a}, 9, _seconds
    )
    copy, multiply = (statistics.median(times[name]) for name in ("copy", "multiply"))
    return {"copy GB/s": 2 * COPY_BYTES / copy / 1e9, "TFLOP/s": 2 * MATRIX**3 / multiply / 1e12}


def measure(case: StepShape, rounds: int, device_limits: dict[str, float]) -> Result:
    """Run one case `rounds` times against its peers."""
    step = step_of(case, torch.device("cuda"))
    runs = peers(step)
    times = interleave(runs, rounds, _seconds)
    median = {name: statistics.median(t) for name, t in times.items()}
    best = min(DELTAS, key=lambda delta: median[f"fused {delta}"])
    fused, seconds = f"fused {best}", median[f"fused {best}"]
    expected = runs[fused]()[: step.new].float()
    differences = [
        float((run()[: step.new].float() - expected).abs().max())
        for name, run in runs.items()
        if not name.startswith("fused ")
    ]
    return Result(
        case=case,
        milliseconds={name: 1e3 * t for name, t in median.items()},
        ratio={name: median_ratio(times[name], times[fused]) for name in runs},
        best_delta=best,
        read_share=step.kv_bytes / seconds / 1e9 / device_limits["copy GB/s"],
        multiply_share=step.flops / seconds / 1e12 / device_limits["TFLOP/s"],
        largest_difference=max(differences, default=0.0),
    )


def _seconds(run: Run) -> float:
    """Per call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS


def step_of(case: StepShape, device: torch.device) -> Step:
    """The step of a case: every request decodes one token."""
    return Step(case, 1, torch.bfloat16, device)


def peers(step: Step) -> dict[str, Run]:
    """Everything compared; FlashInfer's only where it is installed."""
    from ellm_sgl.kernels.experimental.triton.attention import FusedAttention

    everything, device = slice(0, None), step.keys.device
    kernel = FusedAttention(device)

    def fused(delta: int) -> Run:
        return lambda: step.run(kernel, step.mixed, everything, delta=delta / 1024)

    runs = {f"fused {delta}": fused(delta) for delta in DELTAS}
    # Layouts are prepared once per layer group: one object for each keeps its own.
    first, second = FusedAttention(device), FusedAttention(device)

    def apart(*args: Any) -> torch.Tensor:
        return (first if args[5] is step.recompute else second)(*args)

    runs["fused, apart"] = lambda: step.run_apart(apart)
    if flashinfer.problem() is not None:
        return runs
    return runs | whole_flashinfer(step, importlib.import_module("flashinfer"))


def whole_flashinfer(step: Step, library: Any) -> dict[str, Run]:
    """FlashInfer (`library`) with everything in the pool: in two launches, and in one."""
    case, device, pool = step.shape, step.keys.device, (step.keys, step.values)
    workspace = torch.empty(flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    shape = case.heads, case.kv_heads, case.head_dim, BLOCK_TOKENS
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": step.scale}
    d_pages = _decode_pages(step)
    q_new, q_span = step.q[: case.batch], step.q[case.batch :]
    decode = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=flashinfer.tensor_cores(case.heads, case.kv_heads)
    )
    decode.plan(*d_pages, *shape, **types)
    if not step.recompute.rows:
        return {"flashinfer, apart": lambda: decode.run(q_new, pool)}
    p_starts, p_pages = _prefill_pages(step)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(p_starts, *p_pages, *shape, causal=True, **types)

    def apart() -> torch.Tensor:
        prefill.run(q_span, pool)
        out = decode.run(q_new, pool)
        assert isinstance(out, torch.Tensor)
        return out

    pod = library.BatchPODWithPagedKVCacheWrapper(torch.empty_like(workspace), "NHD")
    d_starts = torch.arange(case.batch + 1, dtype=torch.int32)
    pod.plan(p_starts, *p_pages, d_starts, *d_pages, *shape, **types)
    return {
        "flashinfer, apart": apart,
        "flashinfer POD": lambda: pod.run(q_span, pool, q_new, pool, causal_p=True)[1],
    }


def _decode_pages(step: Step) -> tuple[torch.Tensor, ...]:
    """indptr, units and last page lengths of the rows that decode, as FlashInfer takes them."""
    pages = divide(step.decode.requests, BLOCK_TOKENS).decode
    places = torch.from_numpy(pages.places).to(step.keys.device)
    indptr, last = (torch.from_numpy(a).to(torch.int32) for a in (pages.indptr, pages.last_tokens))
    return indptr, step.decode.units[places].to(torch.int32), last


def _prefill_pages(step: Step) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Row starts and pages of the recomputed ranges: each attends to its own blocks."""
    requests = step.recompute.requests
    counts = torch.tensor([0, *(r.new.size for r in requests)], dtype=torch.int32)
    blocks = counts // BLOCK_TOKENS
    units = [step.recompute.units[r.blocks][: r.new.size // BLOCK_TOKENS] for r in requests]
    last = torch.full((len(requests),), BLOCK_TOKENS, dtype=torch.int32)
    indptr = blocks.cumsum(0).to(torch.int32)
    return counts.cumsum(0).to(torch.int32), (indptr, torch.cat(units).to(torch.int32), last)
