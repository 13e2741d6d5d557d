"""What a server learns of output lengths: from every answer that ends, by priority."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ellm_sgl.policies.lengths import OutputLengths, Seen

MOST_CLASSES = 16
"""Priorities whose lengths are known apart: those of which an answer ended last."""


class Answers:
    """Lengths of the answers that have ended, in tokens."""

    def __init__(self) -> None:
        self.seen = Seen.nothing()
        self.by_class: Mapping[int, Seen] = {}
        """By priority."""

    def ended(self, tokens: int, priority: int, cut_off: bool) -> None:
        """An answer more.

        Args:
            cut_off: it ended at its request's bound, not by itself.
        """
        self.seen = self.seen.and_one(tokens, cut_off)
        others = {k: seen for k, seen in self.by_class.items() if k != priority}
        known = self.by_class.get(priority, Seen.nothing())
        latest = [*others.items(), (priority, known.and_one(tokens, cut_off))]
        self.by_class = dict(latest[-MOST_CLASSES:])

    def known(
        self, generated: npt.NDArray[np.int64], priority: npt.NDArray[np.int64]
    ) -> OutputLengths:
        """What is known of output lengths.

        Args:
            generated, priority: of each running request, int64 [running].
        """
        return OutputLengths(self.seen, self.by_class, generated, priority)
