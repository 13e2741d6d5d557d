"""States that the conformance kit asks a policy about, and what is possible in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ellm_sgl.policies.base import Requests, SystemState
from ellm_sgl.policies.planned import evictable_tokens
from ellm_sgl.policies.testing.generate import Size, random_state, requests

Described = tuple[str, SystemState]
"""A state, and a line that describes it."""
SMALL = Size(running=24, waiting=48, longest=4096)


def generated(count: int) -> Iterator[Described]:
    """States drawn at random, small enough to look at; each line ends with how to make it."""
    for seed in range(count):
        state = random_state(np.random.default_rng(seed), SMALL)
        made = f"generate.random_state(default_rng({seed}), {SMALL})"
        yield f"state: {_describe(state)}; {made}", state


def with_ample_memory(state: SystemState) -> SystemState:
    """The same running requests, nobody waiting, and twice what they need, or come to need."""
    running = state.running
    longest = running.prompt_tokens + running.max_new_tokens
    share = float(np.maximum(longest, running.tokens).sum() / running.tokens.sum())
    return with_memory(state, 2.0 * share)


def with_memory(state: SystemState, share: float) -> SystemState:
    """The same running requests, nobody waiting, and this share of the memory they need; what
    does not fit is uncached, from the front of the list."""
    block = state.memory.block_tokens
    need = -(-state.running.tokens // block) * block
    device = max(block, int(need.sum() * share) // block * block)
    short = max(0, int(need.sum()) - device)
    most = evictable_tokens(state.running, block)
    before = np.cumsum(most) - most
    uncached = np.clip(short - before, 0, most)
    on_host = np.minimum(state.running.uncached_on_host, uncached)
    for column in (uncached, on_host):
        column.setflags(write=False)
    free = max(0, device - int(need.sum() - uncached.sum()))
    memory = replace(
        state.memory,
        device_tokens=device,
        device_free_tokens=free,
        max_restored_tokens=max(state.memory.max_restored_tokens, int(uncached.sum())),
    )
    running = replace(state.running, uncached_tokens=uncached, uncached_on_host=on_host)
    return replace(state, running=running, waiting=requests([]), memory=memory, last_step=None)


def with_room(state: SystemState) -> SystemState:
    """The same running requests, all cached, nobody waiting, and a free block for each."""
    block = state.memory.block_tokens
    need = int((-(-state.running.tokens // block) * block).sum())
    room = need + block * len(state.running)
    return with_memory(state, (room + 0.5) / need)  # in the middle of a token: it is cut to blocks


def missing_tokens(state: SystemState, uncached: float, restored: float) -> float:
    """Device tokens that are too few if `uncached` tokens of the running requests are; Eq. (1).

    What is resident now and what is free is there to use; a step takes M_o per restored token.

    Args:
        restored: those of `uncached` that the step restores: of requests that take part in it.
    """
    now = float(state.running.uncached_tokens.sum())
    overhead = state.memory.staging_overhead * restored
    return now - uncached + overhead - state.memory.device_free_tokens


def some_ratios_fit(state: SystemState) -> bool:
    """Whether the most that may be uncached, or as much as one step can restore, fits."""
    most = float(evictable_tokens(state.running, state.memory.block_tokens).sum())
    most = min(most, float(state.memory.max_restored_tokens))
    return missing_tokens(state, most, most) <= 0


def extremes() -> Iterator[Described]:
    """What generated states rarely are."""
    busy = random_state(np.random.default_rng(1), Size(4, 6, 2048), exact_size=True)
    nobody = requests([])
    one = requests([1], tpot_slo_s=1e-9, ttft_slo_s=1e-9, priority=10**6)
    huge = requests([10**7], prompt_tokens=[10**6], max_new_tokens=10**7)
    changes: dict[str, dict[str, Any]] = {
        "nothing to do": {"running": nobody, "waiting": nobody},
        "nobody runs": {"running": nobody},
        "nobody waits": {"waiting": nobody},
        "no free memory": {"memory": replace(busy.memory, device_free_tokens=0)},
        "one place, taken": {"max_running": len(busy.running)},
        "an SLO nobody can keep": {"tpot_slo_s": 1e-9},
        "requests of one token": {"running": one, "waiting": one},
        "a request of ten million tokens waits": {"waiting": huge},
    }
    for name, change in changes.items():
        state = replace(busy, **change)
        yield f"state: {name}, {_describe(state)}", state


def _describe(state: SystemState) -> str:
    memory = state.memory
    return (
        f"{_lengths(state.running)} running, {_lengths(state.waiting)} waiting, at most "
        f"{state.max_running} at once, {memory.device_free_tokens:,} of {memory.device_tokens:,} "
        f"tokens free, blocks of {memory.block_tokens}, SLO {state.tpot_slo_s:g} s"
    )


def _lengths(those: Requests) -> str:
    if len(those) == 0:
        return "0"
    return f"{len(those)} (of {those.tokens.min():,} to {those.tokens.max():,} tokens)"
