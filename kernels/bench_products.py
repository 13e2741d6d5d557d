"""Times the matrix products of few rows against PyTorch's and against reading the weights.

Peers, interleaved as in `bench`:
- `linear`: `torch.nn.functional.linear`;
- `onednn`: oneDNN through PyTorch, with weights packed for that many rows before (16 bits: where
  the processor has instructions for them).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from ellm_sgl.kernels.bench import LIMIT_BYTES, TYPES, seconds
from ellm_sgl.kernels.bench_step import Run, interleave, median_ratio
from ellm_sgl.kernels.cpu.product import linear
from ellm_sgl.kernels.cpu.tune import choose_weight_prefetch

COLD_BYTES = 96 << 20
"""Weights that the calls of a run take in turn, so that they come from memory as in a model."""
MOST_WEIGHTS = 256


@dataclass(frozen=True)
class Case:
    """x [rows, size] · weightᵀ [size, outputs]."""

    rows: int
    outputs: int
    size: int
    dtype: str


@dataclass(frozen=True)
class Result:
    """One case: medians of the rounds."""

    case: Case
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    """Each peer's time over that of the C++ kernel."""
    read_share: float
    """Weight bytes per second over the read bandwidth of the same round."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cases() -> tuple[Case, ...]:
    """A layer's largest products in a model of 1B parameters (bf16), and in the demo model."""
    shapes = ((16384, 2048, "bfloat16"), (2048, 8192, "bfloat16"), (2048, 2048, "float32"))
    found = [Case(rows, *shape) for shape in shapes for rows in (1, 4, 8, 16, 32)]
    return (*found, *(Case(rows, 1024, 192, "float32") for rows in (1, 8, 32)))


def measure(case: Case, rounds: int) -> Result:
    """Run one case `rounds` times against its peers and the machine."""
    dtype = TYPES[case.dtype]
    choose_weight_prefetch(dtype)  # as a server does
    one = case.outputs * case.size * dtype.itemsize
    weights = [
        torch.randn(case.outputs, case.size).to(dtype)
        for _ in range(max(2, min(MOST_WEIGHTS, COLD_BYTES // one)))
    ]
    packed: list[torch.Tensor] = []
    if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, case.rows) for weight in weights]
    x = torch.randn(case.rows, case.size).to(dtype)
    stream = torch.ones(LIMIT_BYTES // 4)

    def ours() -> None:
        for weight in weights:
            if linear(x, weight) is None:  # where it leaves the product to PyTorch
                functional.linear(x, weight)

    def pytorch() -> None:
        for weight in weights:
            functional.linear(x, weight)

    def onednn() -> None:
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    peers: dict[str, Run] = {"linear": pytorch, **({"onednn": onednn} if packed else {})}
    runs: dict[str, Run] = {"cpu": ours, **peers, "read": stream.sum}
    with torch.inference_mode():
        times = interleave(runs, rounds, seconds)
    own, calls = times["cpu"], len(weights)
    return Result(
        case=case,
        milliseconds={
            name: 1e3 * statistics.median(t) / (1 if name == "read" else calls)
            for name, t in times.items()
        },
        ratio={name: median_ratio(times[name], own) for name in peers},
        read_share=median_ratio(times["read"], own) * one * calls / LIMIT_BYTES,
    )
