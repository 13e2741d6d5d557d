"""The C++ kernels for matrix products of few rows, and oneDNN for those of many in fp32, in the
layers of SGLang's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ellm_sgl.kernels.cpu.onednn import linear_of_many
from ellm_sgl.kernels.cpu.product import linear

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessor


def apply(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hook around `UnquantizedLinearMethod.apply`."""
    # `layer.weight` is a search in Python that takes as long as some of these products.
    weight = layer._parameters.get("weight")
    if weight is None or (out := product(x, weight, bias)) is None:
        return original(method, layer, x, bias)
    return out


def lm_head(
    original: Callable[..., torch.Tensor],
    processor: LogitsProcessor,
    hidden_states: torch.Tensor,
    head: Any,
    embedding_bias: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Hook around `LogitsProcessor._compute_lm_head`, whose own product is plain where the head has
    a plain weight and nothing asks for another type. `others`: from 0.5.23 a buffer for the
    result, which SGLang's own product uses on CUDA devices only."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    plain = (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and not hasattr(head, "set_lora")
        and not processor.use_fp32_lm_head
        and processor.rl_on_policy_target is None
        and embedding_bias is None
    )
    if plain and (out := product(hidden_states, head.weight, None)) is not None:
        return out
    return original(processor, hidden_states, head, embedding_bias, **others)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """`torch.nn.functional.linear`; None where PyTorch's own is to do it."""
    if (out := linear(x, weight, bias)) is None:
        out = linear_of_many(x, weight, bias)
    return out
