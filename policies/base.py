"""What a policy sees and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestView:
    """One running request, as a policy sees it. Lengths are in tokens."""

    seq_id: int
    tokens: int
    """Prompt and output so far."""
    shared_tokens: int
    """Tokens in blocks that other requests use too; these stay cached."""
    uncached_tokens: int
    """Tokens that a step has to recompute now."""


@dataclass(frozen=True)
class SystemState:
    """One decode iteration, as a policy sees it. Capacities are in tokens."""

    requests: tuple[RequestView, ...]
    device_tokens_total: int
    device_tokens_free: int
    block_tokens: int


class Policy(ABC):
    """Decides the uncached ratio of every running request.

    A policy is called from the scheduler thread once per decode iteration; it must be a pure
    function of the state (tensor-parallel ranks call it independently and must agree).
    """

    @abstractmethod
    def ratio(self, state: SystemState) -> Sequence[float]:
        """Target uncached ratio r in [0, 1) of each request, in the order of `state.requests`.

        r is a target: blocks that other requests share, and the block being filled, stay
        cached, and memory pressure may push a request above its target until room returns.
        """

    @abstractmethod
    def joining_ratio(self, state: SystemState) -> float:
        """Ratio that a request joining now will be brought to, in [0, 1).

        Admission reserves (1 - r) of what the request may grow to.
        """
