"""On a version of SGLang that eLLM does not know: eLLM is off, and stock SGLang serves.

Two kinds of hooks are of use there: the flags, to say that eLLM is off, and on CPU hosts the
platform's. Neither may keep stock SGLang from serving, so each is put in its place only where
SGLang's function takes what it takes in a version that is known; the others are left out, and one
line names them.
"""

from __future__ import annotations

import os

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang.hooks import Hook, When, hooks_of, used_by
from ellm_sgl.sglang.versions import VERSIONS, adapter_of, turn_off, untested
from ellm_sgl.sglang.versions.signatures import signature_of

TOLD_BY = "ELLM_SGL_TOLD_BY"
"""Environment: the process that has said what is left out. Its children would say the same."""
_ATTENTION = "platform.attention"


def register(sglang: str, on_cpu: bool) -> None:
    """Register what fits; say what does not, and that eLLM is off where it was enabled."""
    wanted = {When.ANY_VERSION, When.PLATFORM} if on_cpu else {When.ANY_VERSION}
    left_out = [
        problem
        for hook in hooks_of(sglang)
        if hook.when in wanted and (problem := _register_hook(hook)) is not None
    ]
    if on_cpu and (problem := _register_attention(sglang)) is not None:
        left_out.append(problem)
    enabled = EllmConfig.from_env() is not None
    if enabled or (left_out and TOLD_BY not in os.environ):
        os.environ[TOLD_BY] = str(os.getpid())
        without = f"; left out: {'; '.join(dict.fromkeys(left_out))}" if left_out else ""
        turn_off(f"{untested(sglang)}{without}")


def off_by_flags(sglang: str) -> None:
    """Flags of eLLM's were given, after hooks were registered."""
    if os.environ.get(TOLD_BY) == str(os.getpid()):
        EllmConfig.clear_env()
    else:
        turn_off(untested(sglang))


def _register_hook(hook: Hook) -> str | None:
    """Why it is left out, if it is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (problem := _changed(hook.target)) is not None:
        return problem
    try:
        function = hook.function
    except Exception as error:  # what our module imports of SGLang may have moved, too
        return f"{hook.ours} ({_in_a_line(error)})"
    HookRegistry.register(hook.target, function, HookType[hook.kind])
    return None


def _register_attention(sglang: str) -> str | None:
    """The platform's attention backend, if all that it needs fits: SGLang's own stands in for it.
    Why it is left out, if it is."""
    hooked = (hook.target for hook in hooks_of(sglang) if hook.ours.startswith(_ATTENTION))
    used = (name for name in used_by(VERSIONS[-1]) if ".layers.attention." in name)
    for target in (*hooked, *used):
        if (problem := _changed(target)) is not None:
            return problem
    try:
        from ellm_sgl.sglang.platform import attention

        attention.register_backend()
    except Exception as error:
        return f"{_ATTENTION} ({_in_a_line(error)})"
    return None


def _changed(target: str) -> str | None:
    """How a function is other than in all versions that are known; None where it is as in one of
    them. Imports what it is in."""
    recorded = [adapter_of(version).signatures.get(target) for version in VERSIONS]
    try:
        here = signature_of(target)
    except Exception as error:  # neither a function nor absent, or its module does not run here
        here = f"({_in_a_line(error)})"
    return None if here in recorded else f"{target} is {here}, recorded {recorded[-1]}"


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
