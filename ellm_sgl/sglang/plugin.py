"""Entry point `sglang.srt.plugins`: installs the hooks of `seams.SEAMS` in every process."""

from __future__ import annotations

import pkgutil
from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang.seams import SEAMS, When


def register() -> None:
    """Register the hooks; SGLang applies them. Where eLLM is not enabled they stay inert."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enabled = EllmConfig.from_env() is not None
    for seam in SEAMS:
        if enabled or seam.when is When.ALWAYS:
            hook: Any = pkgutil.resolve_name(seam.hook)
            HookRegistry.register(seam.target, hook, HookType[seam.kind])
    if enabled:
        from ellm_sgl.sglang.attention import register_backend
        from ellm_sgl.sglang.prefix_cache import register_prefix_cache

        register_backend()
        register_prefix_cache()
