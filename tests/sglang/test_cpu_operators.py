"""The CPU platform's norms, rotary embeddings and gates against those of SGLang's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.layers.activation import SiluAndMul  # noqa: E402  after declare()
from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.layers.rotary_embedding.rope_variant import (  # noqa: E402
    Llama3RotaryEmbedding,
)
from sglang.srt.runtime_context import get_context  # noqa: E402

from ellm_sgl.sglang.platform.operators import norm, rope, silu_and_mul  # noqa: E402

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZE = 96


@pytest.fixture(autouse=True)
def as_in_a_server() -> Iterator[None]:
    with get_context().override_server_args(), torch.inference_mode():
        yield


class Calls:
    """A layer's own function, and how often it was asked."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.count += 1
        return self.function(*args, **more)


def make_norm(dtype: torch.dtype, **options: Any) -> RMSNorm:
    layer = RMSNorm(SIZE, **options)
    layer.weight.data = torch.rand(SIZE).to(dtype) + 0.5
    return layer


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("summed", [False, True])
def test_norms(dtype: torch.dtype, summed: bool) -> None:
    layer, own = make_norm(dtype), Calls(RMSNorm.forward_native)
    x = torch.randn(7, SIZE).to(dtype)
    arguments = (x, torch.randn(7, SIZE).to(dtype)) if summed else (x,)
    expected = own.function(layer, *arguments)
    found = norm(own, layer, *arguments)
    assert own.count == 0
    if summed:
        assert torch.equal(found[1], expected[1])
        found, expected = found[0], expected[0]
    # Sums in another order: the result may round to the neighbour.
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps * 4, atol=0)
    if dtype is not torch.float32:
        assert (found != expected).float().mean() < 0.01


def test_norms_left_to_sglang() -> None:
    x, residual = torch.randn(2, 7, SIZE)
    for options in (
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.bfloat16},
        {"var_hidden_size": SIZE // 2},
    ):
        layer, own = make_norm(torch.float32, **options), Calls(RMSNorm.forward_native)
        found = norm(own, layer, x, residual)
        assert own.count == 1
        for ours, expected in zip(found, own.function(layer, x, residual), strict=True):
            assert torch.equal(ours, expected)
    without, own = RMSNorm(SIZE, has_weight=False), Calls(RMSNorm.forward_native)
    assert norm(own, without, x).shape == x.shape
    assert own.count == 1
    layer, own = make_norm(torch.float32), Calls(RMSNorm.forward_native)
    added = norm(own, layer, x, residual, post_residual_addition=torch.ones(7, SIZE))
    assert own.count == 1
    assert torch.equal(added[1], x + residual + 1)
    with pytest.raises(ValueError, match="hidden_size"):
        norm(own, layer, x[:, 1:], None)


def make_rope(cls: type[RotaryEmbedding], dtype: torch.dtype, **options: Any) -> RotaryEmbedding:
    arguments = {
        "head_size": 32,
        "rotary_dim": 32,
        "max_position_embeddings": 128,
        "base": 10000,
        "is_neox_style": True,
        "dtype": dtype,
        **options,
    }
    return cls(**arguments)


LLAMA_3 = {
    "scaling_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "orig_max_position": 64,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (RotaryEmbedding, {}),
        (RotaryEmbedding, {"rotary_dim": 16}),
        (Llama3RotaryEmbedding, LLAMA_3),
    ],
)
def test_turns(dtype: torch.dtype, cls: type[RotaryEmbedding], options: dict[str, Any]) -> None:
    layer, own = make_rope(cls, dtype, **options), Calls(RotaryEmbedding.forward_native)
    positions = torch.tensor([3, 0, 127, 64])
    q, k = torch.randn(4, 6 * 32).to(dtype), torch.randn(4, 2 * 32).to(dtype)
    expected = own.function(layer, positions, q, k)
    found = rope(own, layer, positions, q, k)
    assert own.count == 0
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_turns_left_to_sglang() -> None:
    positions, q, k = torch.tensor([3, 5]), torch.randn(2, 64), torch.randn(2, 32)
    plain = make_rope(RotaryEmbedding, torch.float32)
    pairs = make_rope(RotaryEmbedding, torch.float32, is_neox_style=False)
    for layer, arguments in (
        (pairs, (positions, q, k)),
        (plain, (positions, q, k, torch.tensor([1, 2]))),
        (plain, (positions, q.bfloat16(), k.bfloat16())),
        (plain, (positions.int(), q, k)),
    ):
        own = Calls(RotaryEmbedding.forward_native)
        found = rope(own, layer, *arguments)
        assert own.count == 1
        expected = own.function(layer, *arguments)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    own = Calls(RotaryEmbedding.forward_native)
    with pytest.raises(IndexError):
        rope(own, plain, torch.tensor([3, 128]), q, k)
    assert own.count == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_gates(dtype: torch.dtype) -> None:
    layer, own = SiluAndMul(), Calls(SiluAndMul.forward_native)
    x = (torch.randn(7, 2 * SIZE) * 4).to(dtype)
    expected = own.function(layer, x)
    found = silu_and_mul(own, layer, x)
    assert own.count == 0
    # Another exponential: the result may round to the neighbour.
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps * 4, atol=1e-6)
    if dtype is not torch.float32:
        assert (found != expected).float().mean() < 0.01


def test_gates_left_to_sglang() -> None:
    layer, own = SiluAndMul(), Calls(SiluAndMul.forward_native)
    x = torch.randn(7, 2 * SIZE, dtype=torch.float64)
    assert torch.equal(silu_and_mul(own, layer, x), own.function(layer, x))
    assert own.count == 1
