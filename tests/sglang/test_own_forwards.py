"""Layers that run another's code are left to SGLang's way."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ellm_sgl.sglang.own_forwards import others_forward
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.layers.activation import SiluAndMul  # noqa: E402  after declare()
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402  after declare()

ACTIVATION = f"{SiluAndMul.__module__}.SiluAndMul"


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module of this class; SGLang's own need a server to be made."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


class Decoder(nn.Module):
    """Of two layers, each an activation of SGLang's."""

    __module__ = "sglang.srt.models.llama"

    def __init__(self, kind: type[nn.Module] = SiluAndMul) -> None:
        super().__init__()
        self.layers = nn.ModuleList([bare(SiluAndMul), bare(kind)])


def test_sglangs_own_are_known() -> None:
    assert others_forward(Decoder()) is None


def test_a_forward_of_one_module_alone_is_seen() -> None:
    for part in (lambda decoder: decoder, lambda decoder: decoder.layers[1]):
        decoder: Any = Decoder()
        part(decoder).forward = lambda *given: None
        kind = type(part(decoder)).__name__
        assert others_forward(decoder) == f"somebody has replaced the forward of a {kind}"


@pytest.mark.parametrize(
    "target", [ACTIVATION, f"{ACTIVATION}.forward", "torch.nn.modules.module.Module.__call__"]
)
def test_another_plugins_hook_is_seen(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = {f"{ACTIVATION}Else.forward", "sglang.srt.models.llama.LlamaModel.forward"}
    monkeypatch.setattr(HookRegistry, "_patched", hooked)
    assert others_forward(Decoder()) is None
    monkeypatch.setattr(HookRegistry, "_patched", {*hooked, target})
    assert others_forward(Decoder()) == f"another plugin has a hook on {target}"


def test_a_class_from_elsewhere_is_seen() -> None:
    class Own(SiluAndMul):
        """As SGLang's, where it has been looked at."""

    assert others_forward(Decoder(Own)) == f"{__name__}.Own is not SGLang's"
