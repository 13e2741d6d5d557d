"""K and V from a layer's hidden states, with the parts of SGLang's own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ellm_sgl.config import ConfigError
from ellm_sgl.sglang.platform.linear import product


class Projections:
    """The K and V projections of a decoder's lowest layers.

    All architectures that eLLM supports have `self_attn` with a fused `qkv_proj`, `rotary_emb` and,
    in Qwen3, a norm of K's heads.

    Raises:
        ConfigError: the weights are not plain matrices.
    """

    def __init__(self, decoder: Any, num_layers: int) -> None:
        self._attentions = [layer.self_attn for layer in decoder.layers[:num_layers]]
        for attention in self._attentions:
            weight = getattr(attention.qkv_proj, "weight", None)
            rows = attention.q_size + 2 * attention.kv_size
            if weight is None or not weight.is_floating_point() or len(weight) != rows:
                raise ConfigError(
                    "--ellm-host-keeps: hidden states need projections that are not quantised; "
                    "leave it out"
                )

    @property
    def inputs(self) -> list[nn.Module]:
        """Of each layer, the module that is called with the projections' input."""
        return [attention.qkv_proj for attention in self._attentions]

    def __call__(
        self, layer: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `step.hidden.Projection`."""
        attention = self._attentions[layer]
        projection, first = attention.qkv_proj, attention.q_size
        bias = None if projection.bias is None else projection.bias[first:]
        weight = projection.weight[first:]
        if (kv := product(states, weight, bias)) is None:  # as the layer itself multiplies
            kv = linear(states, weight, bias)
        k, v = kv.split([attention.kv_size, attention.kv_size], dim=-1)
        if (norm := getattr(attention, "k_norm", None)) is not None:
            k = norm(k.reshape(-1, attention.head_dim)).view(k.shape)
        # SGLang turns Q and K in one call, some of its kernels in place: one head stands for Q.
        q = torch.zeros_like(k[:, : attention.head_dim])
        _, k = attention.rotary_emb(positions, q, k)
        return k, v
