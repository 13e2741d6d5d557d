"""A server whose prefix cache holds a long prompt that nobody has computed.

To prefill a million tokens takes hours here, and a decode step's time does not depend on what the
KV says. So before its first request the server's pool is filled with random numbers, which its tree
takes for the KV of `prompt(tokens)`: requests that begin like that have it cached, and all that
follows is what any request goes through.

    python -m ellm_sgl.eval.bench.filled TOKENS [arguments of the server]
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl.client.process import ServerProcess

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

VOCABULARY = 256


class FilledServer(ServerProcess):
    """Its first argument is how many tokens are cached."""

    module = __name__


def prompt(tokens: int) -> tuple[int, ...]:
    """The first so many tokens of what is cached."""
    return tuple(np.random.default_rng(0).integers(0, VOCABULARY, tokens).tolist())


def fill(scheduler: Scheduler, tokens: int) -> None:
    """Have this server's tree hold the KV of `prompt(tokens)`, whole blocks."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from ellm_sgl.sglang.context import context_of
    from ellm_sgl.sglang.versions import adapter

    ours, tree = context_of(scheduler), scheduler.tree_cache
    block_tokens = ours.table.shape.block_tokens
    whole = tokens // block_tokens * block_tokens
    slots = scheduler.token_to_kv_pool_allocator.alloc(whole)
    anybody: Any = SimpleNamespace(extra_key=None, cache_salt=None)
    key = adapter().radix_key(_ids(whole), anybody)
    ours.pool.buffer[: ours.table.committed_units + 1].uniform_(-1, 1)
    ours.table.note_read(slots[::block_tokens].numpy() // block_tokens)
    tree.insert(InsertParams(key=key, value=slots))


def _ids(tokens: int) -> Any:
    """As SGLang has the ids of a request."""
    from array import array

    return array("q", prompt(tokens))


def main(tokens: int) -> None:
    """Run the server with what else the command line says."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before(fill_with: int, scheduler: Scheduler, *_: Any) -> None:
        fill(scheduler, fill_with)

    loop = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
    HookRegistry.register(loop, partial(before, tokens), HookType.BEFORE)
    runpy.run_module(ServerProcess.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv.pop(1)))
