"""Entry point `sglang.srt.plugins`: installs the hooks of `seams.SEAMS` in every process."""

from __future__ import annotations

import multiprocessing
import pkgutil
from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang.platform_entry import activate
from ellm_sgl.sglang.seams import SEAMS, When


def register() -> None:
    """Register the hooks that this process needs; SGLang applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enabled, on_cpu = EllmConfig.from_env() is not None, activate() is not None
    wanted = {
        When.MAIN: multiprocessing.parent_process() is None,
        When.PLATFORM: on_cpu,
        When.ENABLED: enabled,
    }
    for seam in SEAMS:
        if wanted[seam.when]:
            hook: Any = pkgutil.resolve_name(seam.hook)
            HookRegistry.register(seam.target, hook, HookType[seam.kind])
    if on_cpu:
        from ellm_sgl.sglang import cpu_attention

        cpu_attention.register_backend()
    if enabled:
        from ellm_sgl.sglang.attention import register_backend
        from ellm_sgl.sglang.prefix_cache import register_prefix_cache

        register_backend()
        register_prefix_cache()
