"""Entry point `sglang.srt.plugins`: installs the hooks of `hooks.HOOKS` in every process.

What a process is for cannot be told from where it stands: servers are started from a shell, from a
notebook, or by a training framework in a child process. So hooks are chosen by what is enabled,
never by process, and each is on a function that only processes of its role call.
"""

from __future__ import annotations

from collections.abc import Iterable

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang import unknown_version
from ellm_sgl.sglang.hooks import When, hooks_of
from ellm_sgl.sglang.platform_entry import activate
from ellm_sgl.sglang.versions import VERSIONS, installed


def register() -> None:
    """Register the hooks for what is enabled here; SGLang applies them."""
    sglang, on_cpu = installed(), activate() is not None
    if sglang not in VERSIONS:
        unknown_version.register(sglang, on_cpu)
        return
    enabled = EllmConfig.from_env() is not None
    wanted = {
        When.ANY_VERSION: True,
        When.ALWAYS: True,
        When.PLATFORM: on_cpu,
        When.ENABLED: enabled,
    }
    register_hooks(when for when in wanted if wanted[when])
    if on_cpu:
        from ellm_sgl.sglang.platform import attention as cpu_attention

        cpu_attention.register_backend()
    if enabled:
        register_backends()


def register_hooks(wanted: Iterable[When]) -> None:
    """Those of some times, in the order of the table."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    chosen = frozenset(wanted)
    for hook in hooks_of(installed()):
        if hook.when in chosen:
            HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def register_backends() -> None:
    """eLLM's attention and prefix cache, under their names."""
    from ellm_sgl.sglang.attention import register_backend
    from ellm_sgl.sglang.prefix_cache import register_prefix_cache

    register_backend()
    register_prefix_cache()
