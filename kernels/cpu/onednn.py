"""Matrix products of many rows in fp32 by oneDNN, which PyTorch has with it."""

from __future__ import annotations

import torch

from ellm_sgl.kernels.cpu.product import is_plain

FASTER = torch.backends.mkldnn.is_available() and (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
)
"""Whether oneDNN is there, on a processor on which it is known to be faster. The compiled kernels
need not be there."""


def linear_of_many(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`torch.nn.functional.linear` in fp32; None where oneDNN is not for it. PyTorch goes to it for
    16 bits by itself, and for fp32 to MKL, which takes twice the time on AMD's processors.

    Args:
        x: [rows, size].
        weight: [outputs, size].
        bias: [outputs], contiguous.
    """
    if (
        not FASTER
        or x.dtype is not torch.float32
        or x.dim() != 2
        or not x.numel()
        or weight.dim() != 2
        or x.shape[1] != weight.shape[1]
        or not is_plain(x, weight)
        or not (bias is None or _fits(bias, weight))
    ):
        return None
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    """Strides of a bias are not looked at by the operator."""
    plain = bias.dtype is weight.dtype and bias.is_contiguous()
    return plain and bias.shape == weight.shape[:1]
