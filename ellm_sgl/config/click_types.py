"""Types of numeric command-line options. Every one has two ends, and refuses nan and infinities.

`click.IntRange` does for whole numbers; `FiniteRange` for the others.
"""

from __future__ import annotations

from typing import Any

import click

from ellm_sgl.config.ranges import MOST_TOKENS, Range


class FiniteRange(click.FloatRange):
    """The finite numbers from `low` to `high`."""

    name = "number"

    def __init__(
        self, low: float, high: float, *, low_open: bool = False, high_open: bool = False
    ) -> None:
        super().__init__(low, high, min_open=low_open, max_open=high_open)
        self._range = Range(low, high, low_open, high_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number.

        Raises:
            click.BadParameter: it is none, or outside of the range; nan passes click's own check.
        """
        number = float(click.FLOAT.convert(value, param, ctx))
        if number not in self._range:
            self.fail(f"{number:g}: give {self._range}.", param, ctx)
        return number


TOKENS = click.IntRange(1, MOST_TOKENS)
TOKENS_OR_NONE = click.IntRange(0, MOST_TOKENS)
LAYERS = click.IntRange(1, 10_000)
REQUESTS = click.IntRange(1, 10**7)
ROUNDS = click.IntRange(1, 10_000)
SEED = click.IntRange(0, 2**32 - 1)
MILLISECONDS = FiniteRange(0, 10**9, low_open=True)
SECONDS = FiniteRange(0, 10**6, low_open=True)
PER_SECOND = FiniteRange(0, 10**6, low_open=True)
FACTOR = FiniteRange(0, 10**6, low_open=True)
SHARE = FiniteRange(0, 1, high_open=True)
