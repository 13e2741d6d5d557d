"""What one iteration does: as decided, and by request, as it is in force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ellm_sgl.policies import WorkSplit
from ellm_sgl.policies.base import ALL_THREADS

FETCH_ALL = WorkSplit(swap_layers=1, recompute_layers=0, delta=ALL_THREADS // 2)


@dataclass(frozen=True)
class Decision:
    """What one iteration does. Requests are named by their position in what was observed, which
    is the same on all ranks."""

    admit: tuple[int, ...]
    """Waiting requests to admit, in this order."""
    pause: frozenset[int]
    """Running requests that pause for this step."""
    ratios: tuple[float, ...]
    """Target uncached ratio of each running request."""
    admitted_ratios: tuple[float, ...]
    """That which each entry of `admit` will come to: what it counts for in admission."""
    split: WorkSplit
    fetch_ahead_s: float
    """Seconds of the link that the coming step may spend on fetching for requests that
    pause. Decided here because it comes from a clock, and ranks must agree."""
    stands: bool
    """Whether it keeps everything and stands while all fits (`Policy.idle_without_pressure`)."""
    step_bytes: float = math.inf
    """That the machine leaves a step's activations: as of one rank, since ranks must agree."""

    def without_pauses(self) -> Decision:
        """Nobody pauses, and who would have keeps what is cached."""
        kept = tuple(0.0 if i in self.pause else r for i, r in enumerate(self.ratios))
        return replace(self, pause=frozenset(), ratios=kept)


@dataclass(frozen=True)
class InForce:
    """A `Decision` by request; it holds until the next one."""

    uncached_ratios: Mapping[int, float] = field(default_factory=dict)
    """Target uncached ratio by `seq_id` of the running requests."""
    admit: Mapping[int, int] = field(default_factory=dict)
    """Rank by entry (`RequestTable`) of the waiting requests that may be admitted."""
    admitted_ratios: tuple[float, ...] = ()
    """The ratio that each will come to, by rank."""
    reorders: bool = False
    """Whether the ranks depart from the order in which they wait."""
    pause: frozenset[int] = frozenset()
    """Entries of the running requests paused for the step."""
    split: WorkSplit = FETCH_ALL
    fetch_ahead_s: float = 0.0
    stands: bool = False

    @staticmethod
    def of(
        decision: Decision,
        running: Sequence[int],
        seq_ids: Sequence[int],
        waiting: Sequence[int],
    ) -> InForce:
        """A decision on these requests, named by entry, and the running ones also by `seq_id`; all
        in the order in which they were observed."""
        return InForce(
            uncached_ratios=dict(zip(seq_ids, decision.ratios, strict=True)),
            admit={waiting[position]: rank for rank, position in enumerate(decision.admit)},
            admitted_ratios=decision.admitted_ratios,
            reorders=any(a > b for a, b in itertools.pairwise(decision.admit)),
            pause=frozenset(running[position] for position in decision.pause),
            split=decision.split,
            fetch_ahead_s=decision.fetch_ahead_s,
            stands=decision.stands,
        )

    @property
    def first(self) -> int | None:
        """Entry of the first who may be admitted; None if nobody may."""
        return next(iter(self.admit), None)

    @property
    def first_ratio(self) -> float:
        """That of the first who may be admitted; 0 if nobody may."""
        return self.admitted_ratios[0] if self.admitted_ratios else 0.0
