"""What SGLang has once per process: its published arguments, and its functions, hooked."""

from __future__ import annotations

import gc
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

from sglang.srt.plugins.hook_registry import HookType, _wrap_fn  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from ellm_sgl.sglang.hooks import Hook, When, hooks_of  # noqa: E402
from ellm_sgl.sglang.versions import installed  # noqa: E402

_ELSEWHERE = (
    "KVCacheConfigurator",  # `plane.py` calls these hooks itself,
    "Scheduler.__init__",
    "ForwardBatch.init_new",  # and `forward.py` these;
    "ModelRunner.forward",
    "Scheduler.get_internal_state",  # the rest is not part of the memory plane
    "Scheduler.handle_dumper_control",
    "sglang.srt.model_executor.runner.",
    "sglang.srt.models.",
)


@contextmanager
def hooked() -> Iterator[None]:
    """SGLang's functions carry eLLM's hooks, and its arguments are published."""
    with ExitStack() as undo:
        gc.freeze()  # of what SGLang has imported nothing will be garbage
        undo.callback(gc.unfreeze)
        for hook in hooks_of(installed()):
            if hook.when is When.ENABLED and not any(e in hook.target for e in _ELSEWHERE):
                _install(hook, undo)
        context = get_context()
        before = context._server_args
        context.set_server_args(
            ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
        )
        if before is not None:
            undo.callback(context.set_server_args, before)
        undo.enter_context(get_parallel().override(attn_tp_size=1))
        yield


def _install(hook: Hook, undo: ExitStack) -> None:
    """As `HookRegistry.apply_hooks` does, but for a time."""
    path, name = hook.target.rsplit(".", 1)
    owner: Any = pkgutil.resolve_name(path)
    original: Any = getattr(owner, name)
    wrapped = _wrap_fn(original, hook.function, HookType[hook.kind])
    undo.enter_context(patch.object(owner, name, wrapped))
    if isinstance(owner, ModuleType):  # others have imported it by name
        for module in list(sys.modules.values()):
            if module is not owner and vars(module).get(name) is original:
                undo.enter_context(patch.object(module, name, wrapped))
