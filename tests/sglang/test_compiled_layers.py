"""Which layers are compiled, and what is said of others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ellm_sgl.config import ConfigError
from ellm_sgl.kernels.cpu.prefetch import DEFAULT
from ellm_sgl.memory import PoolShape
from ellm_sgl.sglang import compiled_layers
from ellm_sgl.sglang.compiled_layers import CompiledLayers, NotCompiledError
from ellm_sgl.sglang.mixes import Mix
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.layers.quantization.unquant import (  # noqa: E402  after declare()
    UnquantizedLinearMethod,
)


class Layer(nn.Module):
    """A decoder layer with parts of these names."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        for name in parts:
            self.add_module(name, nn.Identity())


def test_parts_that_are_not_known_are_named() -> None:
    compiled_layers._known(Layer("self_attn", "mlp", "input_layernorm"), "")
    compiled_layers._known(Layer("qkv_proj", "o_proj", "attn", "rotary_emb", "k_norm"), "self_attn")
    compiled_layers._known(Layer("gate", "experts", "topk"), "experts")
    with pytest.raises(NotCompiledError, match=r"^Layer has extra, shared_experts$"):
        compiled_layers._known(Layer("experts", "extra", "shared_experts"), "experts")


def test_the_variable_says_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled_layers.VARIABLE, raising=False)
    assert compiled_layers._wanted()
    for text, wanted in (("on", True), ("off", False)):
        monkeypatch.setenv(compiled_layers.VARIABLE, text)
        assert compiled_layers._wanted() == wanted
    for text in ("", "OFF", "0"):
        monkeypatch.setenv(compiled_layers.VARIABLE, text)
        with pytest.raises(ConfigError, match=r"^ELLM_SGL_COMPILED_LAYERS=.*: give on or off"):
            compiled_layers._wanted()


class Checked:
    """Stands in for compiled layers and for made-up steps: logits, and KV [layers, rows]. The
    compiled ones differ by `off`, and notice their steps only where `counts`."""

    most_rows = 1024

    def __init__(self, off: tuple[int, int] | None, counts: bool = True) -> None:
        self._off, self._counts = off, counts
        self.steps = 0
        self.attached = False
        self.checked: list[Mix] = []

    def attach(self) -> None:
        self.attached = True

    def detach(self) -> None:
        self.attached = False

    def that_fit(self, mixes: list[Mix]) -> list[Mix]:
        return [mix for mix in mixes if mix.fits(8192)]

    def outcome(self, mix: Mix, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits, kv = torch.full((mix.requests, 3), seed), torch.full((4, mix.rows), seed)
        if self.attached:
            self.steps += self._counts
            self.checked.append(mix)
            if self._off is not None:
                (logits, kv)[self._off[0]][self._off[1], -1] += 1
        return logits, kv


@pytest.mark.parametrize("block", [1, 16, 64])
def test_compiled_layers_are_attached_where_they_compute_the_same(block: int) -> None:
    found: Any = Checked(off=None)
    compiled_layers._check(found, found, block)
    assert found.attached
    restoring = [mix for mix in found.checked if mix.uncached]
    assert len(restoring) == 3 and all(mix.uncached == block for mix in restoring)
    assert {mix.new > 1 for mix in restoring} == {False, True}


@pytest.mark.parametrize("off", [(0, 0), (1, 0), (1, 2), (1, 3)])
def test_compiled_layers_that_compute_anything_else_are_refused(off: tuple[int, int]) -> None:
    """Other logits, or other KV in one layer only."""
    found: Any = Checked(off)
    with pytest.raises(NotCompiledError, match=r"its results are not those of SGLang's layers: M"):
        compiled_layers._check(found, found, 16)
    assert not found.attached


def test_compiled_layers_that_take_no_step_are_refused() -> None:
    found: Any = Checked(off=None, counts=False)
    with pytest.raises(NotCompiledError, match=r"steps are other than it takes: Mix"):
        compiled_layers._check(found, found, 16)
    assert not found.attached


def test_parameters_that_move_or_are_replaced_are_noticed() -> None:
    first, last = nn.Linear(3, 4), nn.Linear(4, 3, bias=False)
    layers = nn.ModuleList([first, nn.Sequential(last)])
    parameters = compiled_layers.Parameters(layers)
    with torch.no_grad():
        first.weight.copy_(torch.randn(4, 3))
    assert not parameters.moved()
    first.bias.data = torch.randn(4)
    assert parameters.moved()
    parameters = compiled_layers.Parameters(layers)
    last.weight = nn.Parameter(last.weight.detach().clone())
    assert parameters.moved()
    parameters = compiled_layers.Parameters(layers)
    del first.bias
    assert parameters.moved()


def test_weights_that_move_in_a_step_that_recomputes_are_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a step looks at the modules itself; it is others' hooks that keep SGLang's layers."""
    layers = nn.ModuleList([Layer("extra")])
    decoder = SimpleNamespace(layers=layers, forward=None)
    executor: Any = SimpleNamespace(hidden=None, separate=None)
    pool: Any = SimpleNamespace(shape=PoolShape(num_layers=1, layer_group=1, block_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(CompiledLayers, "_compile", lambda _: None)
        found = CompiledLayers(decoder, executor, pool, DEFAULT)
    handle = layers[0].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(NotCompiledError, match=r"^'Layer' object has no attribute 'self_attn'$"):
        found._compile()
    with pytest.raises(NotCompiledError, match=r"^somebody looks at what its modules do$"):
        CompiledLayers(decoder, executor, pool, DEFAULT)
    handle.remove()


class Decoder:
    """SGLang's, of layers that are not looked at further; computes nothing."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([Layer("self_attn")])
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *given: Any, **others: Any) -> str:
        self.calls.append((*given, *others.values()))
        return "SGLang's"


EXECUTOR = SimpleNamespace(hidden=None, separate=None, plan=object())
POOL = SimpleNamespace(shape=PoolShape(num_layers=1, layer_group=1, block_tokens=4))


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> CompiledLayers:
    """Compiled layers of a `Decoder` that take every step, in its place."""
    executor, pool, decoder = (cast(Any, it) for it in (EXECUTOR, POOL, Decoder()))
    with monkeypatch.context() as patch:
        patch.setattr(CompiledLayers, "_compile", lambda _: None)
        found = CompiledLayers(decoder, executor, pool, DEFAULT)
    monkeypatch.setattr(found, "_takes", lambda *_: True)
    found.attach()
    return found


@pytest.mark.parametrize(
    ("reason", "executor", "backend", "ranks"),
    [
        ("hidden states of the layers are kept", {"hidden": object()}, {"prefetch": DEFAULT}, 1),
        ("recomputed rows have a pass of their own", {"separate": object()},
         {"prefetch": DEFAULT}, 1),
        ("attention is not by the C++ kernels", {}, {}, 1),
        ("several ranks", {}, {"prefetch": DEFAULT}, 2),
    ],
)  # fmt: skip
def test_one_line_says_why_layers_are_sglangs_own(
    reason: str,
    executor: dict[str, Any],
    backend: dict[str, Any],
    ranks: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang.srt.runtime_context import get_parallel

    model = SimpleNamespace(model=Decoder())
    runner: Any = SimpleNamespace(attn_backend=SimpleNamespace(**backend), model=model)
    ours: Any = SimpleNamespace(executor=SimpleNamespace(**vars(EXECUTOR) | executor), pool=POOL)
    with caplog.at_level(logging.INFO), get_parallel().override(tp_size=ranks):
        assert compiled_layers.compile_layers(runner, ours) is None
    assert caplog.messages == [f"eLLM layers: SGLang's own ({reason})"]
    assert "forward" not in vars(model.model)


def test_layers_with_different_heads_are_left(attached: CompiledLayers) -> None:
    of = [SimpleNamespace(num_heads=n, num_kv_heads=1, head_dim=8) for n in (1, 2)]
    layers = [SimpleNamespace(self_attn=attention) for attention in of]
    attached._decoder.layers = Several(layers)
    with pytest.raises(NotCompiledError, match=r"^layers have different heads$"):
        attached._compile()


class Several(list[Any]):
    """Layers without parameters."""

    def modules(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("given", "others"),
    [
        (("embeddings",), {}),
        ((None, "proxies"), {}),
        ((None,), {"pp_proxy_tensors": "proxies"}),
    ],
)
def test_a_call_with_more_than_rows_is_sglangs(
    attached: CompiledLayers, given: tuple[Any, ...], others: dict[str, Any]
) -> None:
    ids, at, batch, decoder = torch.zeros(1), torch.zeros(1), object(), attached._decoder
    with patch.object(attached, "_run", return_value="compiled"):
        assert decoder.forward(ids, at, batch) == "compiled"
        assert decoder.forward(ids, at, batch, None, pp_proxy_tensors=None) == "compiled"
        assert decoder.calls == []
        assert decoder.forward(ids, at, batch, *given, **others) == "SGLang's"
    assert decoder.calls == [(ids, at, batch, *given, *others.values())]


def test_weights_that_move_and_cannot_be_compiled_leave_the_model_to_sglang(
    attached: CompiledLayers, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = attached._decoder
    attached._parameters = cast(Any, SimpleNamespace(moved=lambda: True))
    ids, at, batch = torch.zeros(1), torch.zeros(1), object()
    with caplog.at_level(logging.WARNING):
        assert decoder.forward(ids, at, batch) == "SGLang's"
    (said,) = caplog.messages
    assert said.startswith("eLLM layers: from now on SGLang's own ('")
    assert "forward" not in vars(decoder)
    assert decoder.forward(ids, at, batch) == "SGLang's" and len(decoder.calls) == 2


def projection(**other: Any) -> SimpleNamespace:
    plain = {"quant_method": UnquantizedLinearMethod(), "skip_bias_add": False, "bias": None,
             "weight": torch.randn(8, 4)}  # fmt: skip
    return SimpleNamespace(**(plain | other))


def test_plain_projections_are_taken_as_they_are() -> None:
    weight, bias = torch.randn(8, 4), torch.randn(8)
    found = compiled_layers._product(projection(weight=weight, bias=bias))
    assert found.weight.data_ptr() == weight.data_ptr()
    assert found.bias is not None and found.bias.data_ptr() == bias.data_ptr()
    assert compiled_layers._product(projection()).bias is None


@pytest.mark.parametrize(
    "other", [{"quant_method": object()}, {"set_lora": None}, {"skip_bias_add": True}]
)
def test_other_projections_are_left(other: dict[str, Any]) -> None:
    with pytest.raises(NotCompiledError, match="quantised, or adapted"):
        compiled_layers._product(projection(**other))


def test_other_norms_and_rotations_are_left() -> None:
    with pytest.raises(NotCompiledError, match=r"^norm LayerNorm$"):
        compiled_layers._norm(nn.LayerNorm(4))

    class Turning:
        is_neox_style = True

        def forward_native(self) -> None:
            pass

    with pytest.raises(NotCompiledError, match=r"^rotary embedding Turning$"):
        compiled_layers._cosines(Turning())
