"""The work of a step, and what every latency model answers about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Quantity = float | npt.NDArray[Any]
"""A number, or an array of them where several candidate steps are compared at once."""


def smaller(a: Quantity, b: Quantity) -> Quantity:
    """`np.minimum`, which takes ten times as long for two numbers: each step asks for some."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def larger(a: Quantity, b: Quantity) -> Quantity:
    """`np.maximum`, as `smaller`."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


@dataclass(frozen=True, eq=False)
class StepWork:
    """All that a latency model needs of a step: sums over its requests.

    Fields may be arrays of one shape (or broadcastable), one entry per candidate step.
    For request i: s_i tokens, of which the n_i from position a_i on are restored.
    """

    decode_rows: Quantity
    """b: requests that decode one token."""
    decode_tokens: Quantity
    """Σ s_i: tokens whose KV the decode rows read."""
    restored_tokens: Quantity = 0
    """Σ n_i: tokens recomputed (Σ s_i r_i in the paper)."""
    restored_squares: Quantity = 0
    """Σ n_i² (Σ s_i² r_i² in the paper)."""
    restored_prefix: Quantity = 0
    """Σ n_i a_i: (row, resident token) pairs of restored tokens with what lies before them."""
    prefill_rows: Quantity = 0
    """New prompt tokens computed in this step."""
    prefill_pairs: Quantity = 0
    """Σ over prompt rows of the tokens each attends to."""
    swap_tokens: Quantity = 0
    """Tokens whose KV (their layers l1/L) is fetched from host memory."""
    recompute_share: Quantity = 1.0
    """φ = l2 / (l1 + l2): share of the layers that recomputed rows run through."""
    phase_changes: Quantity = 0
    """1 if the step before did the other thing: prompts, or decoding."""

    @property
    def restored_pairs(self) -> Quantity:
        """(row, token) pairs of causal attention of the recomputed rows: Σ n a + n (n + 1) / 2."""
        return self.restored_prefix + (self.restored_squares + self.restored_tokens) / 2


NO_WORK = StepWork(0, 0)


class LatencyModel(ABC):
    """Predicts the time of one step; may learn from measured ones."""

    @abstractmethod
    def step_seconds(self, work: StepWork) -> FloatArray:
        """Time of each candidate step, in seconds; the broadcast shape of `work`'s fields.

        Must not fall as any field but `recompute_share` grows, and must not change the model.
        """

    @abstractmethod
    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one measured step (fields are numbers here). May be a no-op.

        Called by the control loop on one rank only, never by a policy.
        """


@dataclass(frozen=True)
class HostCopies:
    """How much of what a step restores comes from host memory. In tokens of the requests that may
    take part in it; numbers, or arrays that go with the step's work."""

    uncached: Quantity
    """Missing on the device now,"""
    held: Quantity
    """and those of them that the host has."""
    capacity: Quantity
    """That the host can hold of these requests; 0 without a host tier."""

    def fetched(self, restored: Quantity) -> Quantity:
        """Tokens fetched of so many restored ones; the others are recomputed.

        While no more are restored than are missing now, those that the host has come first. What is
        evicted beyond that goes to the host while it fits: copies of what the device still has
        make way there, those of what it misses do not.
        """
        room = larger(self.capacity - self.held, 0)
        evicted = smaller(larger(restored - self.uncached, 0), room)
        return smaller(restored, self.held + evicted)


class FetchingLatencyModel(LatencyModel):
    """Predicts steps that fetch what the host has, and recompute the rest of what they restore.

    What policies are given on a server with a host tier: they ask about tokens restored, and
    fetching is the cheap way. To restore more never costs less.

    Args:
        inner: predicts a step of known ways; this one learns nothing.
        copies: what the host has and can take.
    """

    def __init__(self, inner: LatencyModel, copies: HostCopies) -> None:
        self._inner = inner
        self._copies = copies

    def step_seconds(self, work: StepWork) -> FloatArray:
        restored = work.restored_tokens
        fetched = self._copies.fetched(restored)
        fetches = fetched > 0
        swapped: Quantity
        if isinstance(fetches, np.ndarray):
            swapped = np.where(fetches, restored, 0)
        else:
            swapped = restored if fetches else 0
        return self._inner.step_seconds(
            replace(
                work,
                swap_tokens=swapped,
                recompute_share=1.0 - fetched / larger(restored, 1.0),
            )
        )

    def with_copies(self, copies: HostCopies) -> FetchingLatencyModel:
        """Of other requests."""
        return FetchingLatencyModel(self._inner, copies)

    def observe(self, work: StepWork, seconds: float) -> None:
        raise TypeError("show measured steps to the model within")
