"""A server's worker processes as copies of its first one: what all of them import is imported once.

SGLang has Python spawn its scheduler and its detokenizer, so that each imports torch, transformers
and all of SGLang again: 7 s of a core per process, more than half of what a start costs on a CPU
host. Where `ellm-sgl serve` starts a server the first process has nothing else to do, and workers
are forked from it. A device's driver does not survive that, and neither do threads: there, and
wherever a process has a second thread, SGLang's way stands.
"""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path
from typing import Any

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang import plugin
from ellm_sgl.sglang.hooks import When, hooks_of
from ellm_sgl.sglang.platform_entry import activate
from ellm_sgl.sglang.versions import VERSIONS, installed

logger = logging.getLogger(__name__)


_prepared_for: bool | None = None
"""Whether the servers that copies of this process are may have eLLM; None: it is not prepared."""


def may_be_copied() -> None:
    """This process does nothing but serve, and its arguments are known: let workers be copies of
    it, prepared for them, unless it was before its arguments were known.

    Raises:
        RuntimeError: it was, for servers with eLLM, and this one has none.
    """
    enabled = EllmConfig.from_env() is not None
    if _prepared_for is None:
        prepare(enabled)
    elif _prepared_for and not enabled:
        raise RuntimeError("a stock server cannot be a copy of a process that has eLLM's hooks")


def prepare(enabled: bool) -> None:
    """A copy does not load SGLang's plugins again, so what workers need is installed here.

    Does nothing where another plugin has hooks in the places of ours: SGLang applies all hooks on
    a function at once, and ours would be left out.

    Args:
        enabled: eLLM is, or will be in all copies.
    """
    global _prepared_for
    from sglang.srt.plugins.hook_registry import HookRegistry

    sglang = installed()
    if activate() is None or sglang not in VERSIONS:
        return
    wanted = (When.COPIED, When.ENABLED) if enabled else (When.COPIED,)
    places = (hook.target for hook in hooks_of(sglang) if hook.when in wanted)
    if not HookRegistry._patched.isdisjoint(places):
        return
    plugin.register_hooks(wanted)
    if enabled:
        plugin.register_backends()
    HookRegistry.apply_hooks()
    _prepared_for = enabled


def fork_if_alone(_: Any, server_args: Any, *__: Any) -> None:
    """Hook after `_set_envs_and_config`, which has just said "spawn"."""
    if (reason := _why_not(server_args)) is None:
        multiprocessing.set_start_method("fork", force=True)
    else:
        logger.info("%s: worker processes are spawned, and import all again", reason)


def _why_not(server_args: Any) -> str | None:
    """Why workers of a server with these arguments may not be copies of this process."""
    if server_args.numa_node is not None:
        return "--numa-node"  # SGLang has another program start Python then
    if server_args.dp_size > 1:
        return "--dp-size"  # its controller starts workers from threads
    threads = len(list(Path("/proc/self/task").iterdir()))
    return None if threads == 1 else f"{threads} threads"
