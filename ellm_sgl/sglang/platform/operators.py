"""The C++ kernels for what lies between matrix products, in the layers of SGLang's models.

Parameters and buffers are looked up where modules keep them: `layer.weight` is a search in Python
that takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ellm_sgl.kernels.cpu.operators import gate, normalise, rotate

if TYPE_CHECKING:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding


def is_plain(layer: RMSNorm) -> bool:
    """Whether a norm is no more than its definition, in the type of what it is given."""
    return (
        layer.override_orig_dtype is None
        and layer.variance_size_override is None
        and not layer.fp32_residual
        and not layer.cast_x_before_out_mul
    )


def norm(
    original: Callable[..., Any],
    layer: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Hook around `RMSNorm.forward_native`. `others`: from 0.5.20 a layer that other platforms'
    norms quantise for."""
    if (
        post_residual_addition is None
        and is_plain(layer)
        and (weight := layer._parameters.get("weight")) is not None
        and (found := normalise(x, weight, layer.variance_epsilon, residual))
    ):
        return found[0] if residual is None else found
    return original(layer, x, residual, post_residual_addition, **others)


def rope(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    layer: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hook around `RotaryEmbedding.forward_native`. Turns both where they are, as SGLang's own
    kernels for other devices do."""
    if (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and layer.is_neox_style
        and (cosines := layer._buffers.get("cos_sin_cache")) is not None
        and rotate(positions, query, key, layer.head_size, cosines)
    ):
        return query, key
    return original(layer, positions, query, key, offsets, fused_set_kv_buffer_arg)


def silu_and_mul(
    original: Callable[..., torch.Tensor], layer: SiluAndMul, x: torch.Tensor
) -> torch.Tensor:
    """Hook around `SiluAndMul.forward_native`."""
    out = gate(x)
    return original(layer, x) if out is None else out
