"""A decoder built like SGLang's, a few thousand weights large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from ellm_sgl.kernels.torch_paged import mixed_attention
from ellm_sgl.memory import KVPool
from ellm_sgl.step import StepPlan

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 24
SCALE = HEAD_DIM**-0.5
MAX_TOKENS = 128

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v), each [rows, heads, head_dim] → [rows, heads, head_dim]."""


class TinyNorm(nn.Module):
    """Adds the residual and norms, as SGLang's fused norms do."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden if residual is None else hidden + residual
        return rms_norm(total, (HIDDEN,)), total


class TinyLayer(nn.Module):
    """Attention and MLP; takes and returns (hidden, residual) as SGLang's layers do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = TinyNorm()
        self.post_attention_layernorm = TinyNorm()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.turn = nn.Embedding(MAX_TOKENS, HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attend: Attend,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        assert len(positions) == len(hidden)
        q, k, v = self.project(self.qkv(hidden), positions)
        hidden = self.out(attend(self.index, q, k, v).flatten(1))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

    def project(
        self, qkv: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V; K tells where its token is."""
        rows = qkv.view(len(qkv), -1, HEAD_DIM)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return q, k + self.turn(positions)[:, None], v


class TinyDecoder(nn.Module):
    """`decoder(input_ids, positions, attend)` → hidden states, [rows, HIDDEN]."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(map(TinyLayer, range(layers)))
        self.norm = TinyNorm()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, attend, residual)
        out: torch.Tensor = self.norm(hidden, residual)[0]
        return out


def attend_paged(plan: StepPlan, pool: KVPool) -> Attend:
    """Attention of a planned step, as eLLM's attention backend computes it."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = pool.shape.group_of(layer)
        layout = plan.groups[group]
        assert len(q) == layout.rows
        needed = plan.rows_in(group + 1 if pool.shape.ends_group(layer) else group)
        keys, values = pool.keys(layer), pool.values(layer)
        return mixed_attention(q, k, v, keys, values, layout, SCALE, out_rows=needed)

    return attend


def compute_fully(
    decoder: TinyDecoder, tokens: Any
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(hidden states, (K, V) of each layer) of one whole sequence, without any cache."""
    kv = []

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kv.append((k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
        return out[0].transpose(0, 1)

    tokens = torch.as_tensor(tokens)
    return decoder(tokens, torch.arange(len(tokens)), attend), kv
