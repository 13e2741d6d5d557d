"""Entry point `sglang.srt.plugins`: installs the hooks of `hooks.HOOKS` in every process.

What a process is for cannot be told from where it stands: servers are started from a shell, from a
notebook, or by a training framework in a child process. So hooks are chosen by what is enabled,
never by process, and each is on a function that only processes of its role call.
"""

from __future__ import annotations

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang.hooks import HOOKS, When
from ellm_sgl.sglang.platform_entry import activate


def register() -> None:
    """Register the hooks for what is enabled here; SGLang applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    enabled, on_cpu = EllmConfig.from_env() is not None, activate() is not None
    installed = {When.ALWAYS: True, When.PLATFORM: on_cpu, When.ENABLED: enabled}
    for hook in HOOKS:
        if installed[hook.when]:
            HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    if on_cpu:
        from ellm_sgl.sglang.platform import attention as cpu_attention

        cpu_attention.register_backend()
    if enabled:
        from ellm_sgl.sglang.attention import register_backend
        from ellm_sgl.sglang.prefix_cache import register_prefix_cache

        register_backend()
        register_prefix_cache()
