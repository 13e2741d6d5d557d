"""Growing first: where the pool can grow, a policy that restores would restore in vain."""

from __future__ import annotations

from dataclasses import replace

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import SystemState


def inflated(state: SystemState) -> SystemState:
    """The state with the memory that the pool could come to have, if that costs less than restoring
    the same tokens once; else as it is.

    What is decided on it needs the memory, and the server makes the pool grow to what requests
    need. Till it has grown, and if it does not, the server evicts where it must.
    """
    memory, growth = state.memory, state.memory.growth
    tokens = growth.with_idle_tokens // memory.block_tokens * memory.block_tokens
    if tokens <= 0 or tokens * growth.seconds_per_token >= _restoring_s(state, tokens):
        return state
    grown = replace(
        memory,
        device_tokens=memory.device_tokens + tokens,
        device_free_tokens=memory.device_free_tokens + tokens,
    )
    return replace(state, memory=grown)


def _restoring_s(state: SystemState, tokens: int) -> float:
    """What a step takes longer that restores so many tokens, or as many as one can; for all."""
    some = min(tokens, max(state.memory.max_restored_tokens, 1))
    count = len(state.running)
    decoding = StepWork(max(count, 1), int(state.running.tokens.sum()))
    restoring = replace(
        decoding,
        restored_tokens=some,
        restored_squares=float(some) * state.memory.block_tokens,
        swap_tokens=some if state.memory.host_tokens else 0,
    )
    longer = state.latency.step_seconds(restoring) - state.latency.step_seconds(decoding)
    return float(longer) * tokens / some
