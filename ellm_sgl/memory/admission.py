"""How many of those who wait there is room for, each at its own uncached ratio."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.page_table import PageTable
from ellm_sgl.policies.planned import evictable

TokenCounts = npt.NDArray[np.int64]


class AdmissionRoom:
    """Room of one iteration for those who wait, in the order in which they are to be admitted.

    A token of a request at uncached ratio r takes 1 - (1 - M_o) r of the device. Requests that run
    count as coming to the least ratio among those admitted, where that is above their targets: so
    much they make room, and so little their further tokens take.

    Args:
        free: device tokens that are free, less what was evicted beyond targets: while requests miss
            more than the policy wants, none should be admitted.
        gained: 1 - M_o, device tokens gained by evicting one.
        yields: tokens that those who run lose beyond their targets when brought to a ratio.
    """

    def __init__(
        self, free: int, gained: float = 1.0, yields: Callable[[float], int] = lambda ratio: 0
    ) -> None:
        self._free = free
        self._gained = gained
        self._yields = yields
        self._made: dict[float, int] = {}
        self._least = math.inf
        self._taken = 0.0

    def tokens(self, ratio: float) -> tuple[int, int]:
        """Before anybody is admitted, for requests that are all of this ratio: (now, eventually).

        Now: tokens that fit fully cached, with what those that run make room for. Eventually:
        tokens of requests that fit once all are at the ratio.
        """
        now = self._now(ratio)
        return now, int(now / self._share(ratio))

    def offer(self, ratio: float, others: float) -> tuple[int, float]:
        """As `tokens`, for the next request, of this ratio, when those before it have taken theirs;
        (now) is what it was before they did.

        Args:
            others: tokens to be kept for those that run, and for prompts under way.
        """
        least, share = min(ratio, self._least), self._share(ratio)
        now = self._now(least)
        taken = self._share(least) * others + self._taken
        return now, int(now / share) - taken / share

    def take(self, ratio: float, tokens: float) -> None:
        """A request of this ratio is admitted, and will have so many tokens; 0: it is not."""
        if tokens:
            self._least = min(self._least, ratio)
            self._taken += self._share(ratio) * tokens

    def _share(self, ratio: float) -> float:
        return 1.0 - self._gained * ratio

    def _now(self, ratio: float) -> int:
        if ratio not in self._made:
            self._made[ratio] = int(self._gained * self._yields(ratio)) if ratio else 0
        return self._free + self._made[ratio]


def yields_of(
    table: PageTable,
    targets: Mapping[int, int],
    shared_tokens: Callable[[Sequence[int]], TokenCounts],
) -> Callable[[float], int]:
    """Tokens that all requests lose beyond their targets when brought to a ratio; as of when it is
    first asked.

    Args:
        targets: tokens of each request that are to be missing; 0 of the others.
        shared_tokens: tokens of each request that stay, since others use them too.
    """

    @functools.cache
    def requests() -> tuple[TokenCounts, TokenCounts, TokenCounts]:
        ids = list(table.sequence_ids)
        lengths = table.lengths_of(ids)
        wanted = np.fromiter((targets.get(s, 0) for s in ids), np.int64, len(ids))
        return lengths, wanted, evictable(lengths, shared_tokens(ids), table.shape.block_tokens)

    def yields(ratio: float) -> int:
        lengths, targeted, most = requests()
        wanted = np.minimum((ratio * lengths).astype(np.int64), most)
        return int(np.maximum(wanted - targeted, 0).sum())

    return yields
