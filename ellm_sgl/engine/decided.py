"""A decision, by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ellm_sgl.engine.controller import Decision
from ellm_sgl.policies import WorkSplit
from ellm_sgl.policies.base import ALL_THREADS

FETCH_ALL = WorkSplit(swap_layers=1, recompute_layers=0, delta=ALL_THREADS // 2)


@dataclass(frozen=True)
class Decided:
    """What one iteration does, until the next decision."""

    uncached_ratios: Mapping[int, float] = field(default_factory=dict)
    """Target uncached ratio by `seq_id` of the running requests."""
    admitted_ratio: float = 0.0
    """That of the requests to admit, weighted by their tokens."""
    admit: Mapping[int, int] = field(default_factory=dict)
    """Rank by entry (`RequestTable`) of the waiting requests that may be admitted."""
    reorders: bool = False
    """Whether the ranks depart from the order in which they wait."""
    pause: frozenset[int] = frozenset()
    """Entries of the running requests paused for the step."""
    split: WorkSplit = FETCH_ALL
    fetch_ahead_s: float = 0.0
    """Seconds of the link that the step may spend on those who sit it out."""
    stands: bool = False
    """Keeps all, by a policy that promises to go on so while all fits."""

    @staticmethod
    def of(
        decision: Decision,
        running: Sequence[int],
        seq_ids: Sequence[int],
        waiting: Sequence[int],
    ) -> Decided:
        """A decision on requests named by position.

        Args:
            running: entries of the running requests, and
            seq_ids: their numbers in the page table, in the order in which they were observed.
            waiting: entries of the waiting ones, likewise.
        """
        return Decided(
            uncached_ratios=dict(zip(seq_ids, decision.ratios, strict=True)),
            admitted_ratio=decision.admitted_ratio,
            admit={waiting[position]: rank for rank, position in enumerate(decision.admit)},
            reorders=decision.reorders,
            pause=frozenset(running[position] for position in decision.pause),
            split=decision.split,
            fetch_ahead_s=decision.fetch_ahead_s,
            stands=decision.stands,
        )
