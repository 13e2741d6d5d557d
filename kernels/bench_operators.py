"""Times norms, rotary embeddings and gates against the operators of PyTorch's they stand for."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from ellm_sgl.kernels.bench import TYPES, seconds
from ellm_sgl.kernels.bench_step import Run, interleave, median_ratio
from ellm_sgl.kernels.cpu.operators import gate, normalise, rotate

CALLS = 40
"""Of a run."""
EPSILON = 1e-6
POSITIONS = 4096


@dataclass(frozen=True)
class Case:
    """One operator's call in a model's layer."""

    name: str
    """`norm` (of a sum), `rope` or `gate`."""
    rows: int
    size: int
    """Elements of a row: of the result, or of Q for `rope`; K has a quarter of its heads."""
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class Result:
    """One case: medians of the rounds."""

    case: Case
    microseconds: dict[str, float]
    """Of a call: `cpu`, the C++ kernel, and `operators`, PyTorch's."""
    ratio: float
    """PyTorch's time over that of the C++ kernel."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cases() -> tuple[Case, ...]:
    """The demo model's layers, and those of a model of 1B parameters."""
    models = ((192, 512, 32, "float32"), (2048, 8192, 64, "bfloat16"))
    return tuple(
        Case(name, rows, inner if name == "gate" else size, head_dim, dtype)
        for size, inner, head_dim, dtype in models
        for name in ("norm", "rope", "gate")
        for rows in (1, 8, 256)
    )


def norm_in_operators(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `normalise`, rounded where that rounds."""
    total = x.float() + residual.float()
    factor = torch.rsqrt(total.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (total * factor * weight).to(x.dtype), total.to(x.dtype)


def rope_in_operators(
    positions: torch.Tensor, x: torch.Tensor, head_dim: int, cosines: torch.Tensor
) -> torch.Tensor:
    """As `rotate` turns one of its two, each operator's result rounded."""
    turned = cosines.shape[1]
    cosine, sine = cosines[positions].unsqueeze(1).chunk(2, dim=-1)
    heads = x.reshape(len(x), -1, head_dim)
    a, b = heads[..., :turned].chunk(2, dim=-1)
    parts = (a * cosine - b * sine, b * cosine + a * sine, heads[..., turned:])
    return torch.cat(parts, dim=-1).reshape(x.shape)


def gate_in_operators(x: torch.Tensor) -> torch.Tensor:
    """As `gate`."""
    a, b = x.chunk(2, dim=-1)
    return functional.silu(a) * b


def measure(case: Case, rounds: int) -> Result:
    """Run one case `rounds` times, by turns with PyTorch's operators."""
    pairs = {"norm": _norms, "rope": _ropes, "gate": _gates}
    ours, operators = pairs[case.name](case, TYPES[case.dtype])

    def calls(run: Run) -> Run:
        def several() -> None:
            for _ in range(CALLS):
                run()

        return several

    with torch.inference_mode():
        times = interleave({"cpu": calls(ours), "operators": calls(operators)}, rounds, seconds)
    return Result(
        case=case,
        microseconds={name: 1e6 * statistics.median(t) / CALLS for name, t in times.items()},
        ratio=median_ratio(times["operators"], times["cpu"]),
    )


def _norms(case: Case, dtype: torch.dtype) -> tuple[Run, Run]:
    x, residual = torch.randn(2, case.rows, case.size).to(dtype)
    weight = torch.randn(case.size).to(dtype)
    return (
        lambda: normalise(x, weight, EPSILON, residual),
        lambda: norm_in_operators(x, weight, EPSILON, residual),
    )


def _ropes(case: Case, dtype: torch.dtype) -> tuple[Run, Run]:
    angles = torch.rand(POSITIONS, case.head_dim // 2)
    cosines = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
    q = torch.randn(case.rows, case.size).to(dtype)
    kv_heads = max(1, case.size // case.head_dim // 4)
    k = torch.randn(case.rows, kv_heads * case.head_dim).to(dtype)
    positions = torch.arange(case.rows)
    return (
        lambda: rotate(positions, q, k, case.head_dim, cosines),
        lambda: [rope_in_operators(positions, x, case.head_dim, cosines) for x in (q, k)],
    )


def _gates(case: Case, dtype: torch.dtype) -> tuple[Run, Run]:
    x = torch.randn(case.rows, 2 * case.size).to(dtype)
    return lambda: gate(x), lambda: gate_in_operators(x)
