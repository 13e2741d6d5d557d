"""Attention of one decode row over a long context, beside the same in float64, a part at a time."""

from __future__ import annotations

import torch

from ellm_sgl.kernels.bench_step import Step, StepShape
from ellm_sgl.kernels.choose import choose

CHUNK_UNITS = 4096
"""Whose keys, or values, are in float64 at once."""


def attention_error(context: int, heads: int, kv_heads: int, head_dim: int) -> float:
    """The largest difference between the kernel that a server of such heads runs and float64, over
    the largest output; one request of `context` tokens, fp32, on the CPU."""
    device, dtype = torch.device("cpu"), torch.float32
    shape = StepShape(1, context, 0.0, heads, kv_heads, head_dim)
    step = Step(shape, 1, dtype, device, layers=1)
    kernel = choose(device, head_dim, dtype, dtype, (heads, kv_heads)).kernel
    found = step.run(kernel, step.mixed, slice(0, 1))[0].double()
    right = in_float64(step)
    return float((found - right).abs().max() / right.abs().max())


def in_float64(step: Step) -> torch.Tensor:
    """Softmax of scale · q·k over all tokens, times v: float64 [heads, head_dim].

    Args:
        step: one decode row, whose own KV is in the pool by now.
    """
    shape, parts = step.shape, step.units[0].split(CHUNK_UNITS)
    grouped = step.q[0].double().view(shape.kv_heads, -1, shape.head_dim)

    def tokens(stored: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        return stored[units].flatten(0, 1).double()

    scores = [torch.einsum("kgd,nkd->kgn", grouped, tokens(step.keys, u)) for u in parts]
    scaled = torch.cat(scores, -1)[..., : shape.context] * step.scale
    weights = torch.softmax(scaled, -1).split(CHUNK_UNITS * step.keys.shape[1], -1)
    out = torch.zeros_like(grouped)
    for units, weight in zip(parts, weights, strict=True):
        values = tokens(step.values, units)[: weight.shape[-1]]
        out += torch.einsum("kgn,nkd->kgd", weight, values)
    return out.flatten(0, 1)
