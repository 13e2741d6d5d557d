"""`release_memory_occupation` and `resume_memory_occupation` in the process that tokenizes, where
clients ask for them.

While memory is released the server is paused here, too. Requests under way hold SGLang's lock
against new weights until they have ended, which they do not before memory is back: only of a
paused server does SGLang not wait for that lock. New requests wait here, as while it is paused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ellm_sgl.config import RECOMPUTE, EllmConfig
from ellm_sgl.config.ranges import shown
from ellm_sgl.sglang import cuda, enabling

KV = "kv_cache"
"""SGLang's tag."""
_PAUSED = "_ellm_paused"
"""Attribute of a `TokenizerManager` while memory is released: whether generation is paused
apart from that."""

_Asked = Callable[..., Awaitable[None]]


async def release(original: _Asked, manager: Any, asked: Any, *args: Any, **kwargs: Any) -> None:
    """Around `TokenizerControlMixin.release_memory_occupation`."""
    if (settings := enabling.settings_of(manager)) is None:
        return await original(manager, asked, *args, **kwargs)
    _check(settings, asked.tags)
    async with manager.is_pause_cond:  # as pauses and updates: one of them at a time
        await original(manager, asked, *args, **kwargs)
        if not hasattr(manager, _PAUSED):
            setattr(manager, _PAUSED, manager.is_pause)
            manager.is_pause = True


async def resume(original: _Asked, manager: Any, asked: Any, *args: Any, **kwargs: Any) -> None:
    """Around `TokenizerControlMixin.resume_memory_occupation`."""
    if (settings := enabling.settings_of(manager)) is None:
        return await original(manager, asked, *args, **kwargs)
    _check(settings, asked.tags)
    async with manager.is_pause_cond:
        await original(manager, asked, *args, **kwargs)
        if vars(manager).pop(_PAUSED, True):
            return
        manager.is_pause = False
        manager.is_pause_cond.notify_all()


async def pause(original: _Asked, manager: Any, asked: Any) -> None:
    """Around `TokenizerManager.pause_generation`: a pause outlasts what is released. SGLang waits
    until all that is aborted has ended, which whoever runs does with a step, and while the server
    is paused already there is none: then all go back to the queue first."""
    if asked.mode == "abort" and manager.is_pause and enabling.settings_of(manager) is not None:
        await original(manager, type(asked)(mode="retract"))
    await original(manager, asked)
    if hasattr(manager, _PAUSED):
        setattr(manager, _PAUSED, True)


async def go_on(original: _Asked, manager: Any, asked: Any) -> None:
    """Around `TokenizerManager.continue_generation`: while memory is released, that comes first."""
    await original(manager, asked)
    if hasattr(manager, _PAUSED):
        # Without awaiting anything: whom SGLang has woken look only after this.
        setattr(manager, _PAUSED, False)
        manager.is_pause = True


def _check(settings: EllmConfig, tags: Any) -> None:
    """Only KV can be released. SGLang answers the ValueError with a 400; its scheduler would
    end."""
    if settings.mode == RECOMPUTE:
        raise ValueError(f"memory cannot be released: mode {RECOMPUTE} leaves it to SGLang")
    if cuda.available():
        raise ValueError("memory cannot be released: KV gives memory back on CPU hosts only so far")
    if tags != [KV]:
        raise ValueError(
            f'tags {shown(tags)}: give ["{KV}"]; other memory cannot be released, since that needs '
            "--enable-memory-saver, which eLLM does not support"
        )
