"""Which layers' products the C++ kernels take over, and which are left to SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from ellm_sgl.kernels.cpu import library, product
from ellm_sgl.kernels.cpu.library import Loaded, load
from ellm_sgl.kernels.cpu.onednn import FASTER
from ellm_sgl.sglang.platform import linear
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.layers.quantization.unquant import (  # noqa: E402  after declare()
    UnquantizedEmbeddingMethod,
)

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

LEFT = torch.full((2, 8), 7.0)
"""What stands for SGLang's own result."""


def original(*_: Any, **__: Any) -> torch.Tensor:
    return LEFT


def plain_head(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        quant_method=UnquantizedEmbeddingMethod(), weight=torch.randn(8, 64), **more
    )


def processor(**other: Any) -> Any:
    return SimpleNamespace(**{"use_fp32_lm_head": False, "rl_on_policy_target": None} | other)


@torch.no_grad()
def test_a_plain_head_is_taken_over() -> None:
    head, hidden = plain_head(), torch.randn(2, 64)
    out = linear.lm_head(original, processor(), hidden, head)
    assert out is not LEFT
    torch.testing.assert_close(out, functional.linear(hidden, head.weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head", "of_processor", "bias"),
    [
        (plain_head(set_lora=None), {}, None),
        (plain_head(), {"use_fp32_lm_head": True}, None),
        (plain_head(), {"rl_on_policy_target": "fsdp"}, None),
        (plain_head(), {}, torch.zeros(8)),
        (SimpleNamespace(weight=torch.randn(8, 64)), {}, None),
        (SimpleNamespace(weight=torch.randn(8, 64), quant_method=object()), {}, None),
    ],
    ids=["lora", "fp32 head", "on policy", "bias", "no method", "quantized"],
)
@torch.no_grad()
def test_whatever_is_not_plain_is_left_to_sglang(
    head: Any, of_processor: dict[str, Any], bias: torch.Tensor | None
) -> None:
    hidden = torch.randn(2, 64)
    assert linear.lm_head(original, processor(**of_processor), hidden, head, bias) is LEFT


@torch.no_grad()
def test_16_bit_rows_beyond_those_of_decoding_are_left_to_sglang() -> None:
    layer = torch.nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
    head, x = plain_head(), torch.randn(600, 64).bfloat16()
    head.weight = head.weight.bfloat16()
    assert linear.lm_head(original, processor(), x, head) is LEFT
    assert linear.apply(original, None, layer, x) is LEFT


@torch.no_grad()
def test_where_the_kernels_are_not_built_there_are_products_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (library, product):
        monkeypatch.setattr(module, "load", lambda: Loaded(None, "not built"))
    for asked in (library.instruction_set, library.best_instruction_set):
        asked.cache_clear()  # what was found is asked for anew
    layer, x = torch.nn.Linear(64, 8, bias=False), torch.randn(2, 64)
    out = linear.apply(lambda *_: layer(x), None, layer, x)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not FASTER, reason="left to PyTorch: no oneDNN, or no AVX-512")
@torch.no_grad()
def test_many_rows_of_fp32_are_taken_over_too() -> None:
    layer, head, x = torch.nn.Linear(64, 8), plain_head(), torch.randn(600, 64)
    out = linear.apply(original, None, layer, x, layer.bias)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
    logits = linear.lm_head(original, processor(), x, head)
    torch.testing.assert_close(logits, functional.linear(x, head.weight), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_layer_is_taken_over_if_it_has_a_weight() -> None:
    layer, x = torch.nn.Linear(64, 8), torch.randn(2, 64)
    out = linear.apply(original, None, layer, x, layer.bias)
    torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)
    assert linear.apply(original, None, torch.nn.Identity(), x) is LEFT
