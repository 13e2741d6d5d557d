"""Entry point `sglang.srt.plugins`: installs the hooks of `seams.SEAMS` in every process."""

from __future__ import annotations

import multiprocessing
import pkgutil
from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang.seams import SEAMS, When


def register() -> None:
    """Register the hooks that this process needs; SGLang applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enabled = EllmConfig.from_env() is not None
    for seam in SEAMS:
        if seam.when is When.MAIN:
            wanted = multiprocessing.parent_process() is None
        else:
            wanted = enabled
        if wanted:
            hook: Any = pkgutil.resolve_name(seam.hook)
            HookRegistry.register(seam.target, hook, HookType[seam.kind])
    if enabled:
        from ellm_sgl.sglang.attention import register_backend
        from ellm_sgl.sglang.prefix_cache import register_prefix_cache

        register_backend()
        register_prefix_cache()
