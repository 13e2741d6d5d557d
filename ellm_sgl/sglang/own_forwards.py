"""Whether layers run SGLang's own code: what stands in for them passes by whatever another plugin,
or an external model package, has put in its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ellm_sgl.sglang.hooks import hooks_of
from ellm_sgl.sglang.versions import installed

KNOWN = ("sglang.srt", "torch", "ellm_sgl")
"""Packages whose modules are what is compared and measured here."""


def others_forward(decoder: Any) -> str | None:
    """Whose `forward` in a decoder or its layers is not SGLang's own, in words; None: nobody's."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    parts: list[nn.Module] = [decoder, *decoder.layers.modules()]
    for each in parts:
        if "forward" in vars(each):
            return f"somebody has replaced the forward of a {type(each).__name__}"
    hooked = HookRegistry._patched - {hook.target for hook in hooks_of(installed())}
    for kind in dict.fromkeys(map(type, parts)):
        if not _is_known(kind):
            return f"{kind.__module__}.{kind.__name__} is not SGLang's"
        if (target := _among(hooked, kind)) is not None:
            return f"another plugin has a hook on {target}"
    return None


def _is_known(kind: type) -> bool:
    return any(kind.__module__ == each or kind.__module__.startswith(f"{each}.") for each in KNOWN)


def _among(targets: Collection[str], kind: type) -> str | None:
    """One of these that is the class, one of its bases, or a method of them."""
    for each in kind.__mro__:
        name = f"{each.__module__}.{each.__qualname__}"
        for target in targets:
            if target == name or target.startswith(f"{name}."):
                return target
    return None
