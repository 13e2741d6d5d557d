"""K and V from what a layer's fused projection is given: as the layer itself computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ellm_sgl.config import ConfigError
from ellm_sgl.sglang.projections import Projections

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 6, 2, 4


def turn(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
    """A rotation by position, in place as on a GPU."""
    for rows in (q, k):
        rows.mul_(1 + positions[:, None])
    return q, k


def decoder(bias: bool = False, norm: bool = False) -> Any:
    torch.manual_seed(0)
    attention = SimpleNamespace(
        q_size=HEADS * HEAD_DIM,
        kv_size=KV_HEADS * HEAD_DIM,
        head_dim=HEAD_DIM,
        qkv_proj=nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=bias),
        rotary_emb=turn,
    )
    if norm:
        attention.k_norm = nn.RMSNorm(HEAD_DIM)
    return SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_k_and_v_are_those_of_the_whole_projection(bias: bool, norm: bool) -> None:
    model = decoder(bias, norm)
    attention = model.layers[0].self_attn
    states, positions = torch.randn(7, HIDDEN), torch.arange(3, 10)
    with torch.no_grad():
        q, k, v = attention.qkv_proj(states).split([24, 8, 8], dim=-1)
        if norm:
            k = attention.k_norm(k.reshape(-1, HEAD_DIM)).view(k.shape)
        expected = turn(positions, q.clone(), k.clone())[1]
        got = Projections(model, 1)(0, states, positions)
    torch.testing.assert_close(got, (expected, v))


def test_projections_that_are_no_plain_matrices_are_refused() -> None:
    model = decoder()
    projection = model.layers[0].self_attn.qkv_proj
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"--ellm-host-keeps: .* not quantised"):
        Projections(model, 1)
