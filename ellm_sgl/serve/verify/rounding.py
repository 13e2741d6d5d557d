"""The criterion for 16-bit KV: log-probabilities differ from full caching's by no more than those
of stock SGLang differ between two batch sizes.

In 16 bits two orders of the same additions differ in the last place, and a near tie of two tokens
may tip; what follows is then another text. So tokens decide nothing. Instead each server's own
output is given to stock SGLang, alone and with everything cached, as a prompt: the log-probability
that it gives each token (teacher forcing) would be equal to the one that the server told when it
generated the token, but for rounding. How much rounding is, is measured in the same way: stock's
own output of the whole load at once, its prompts computed whole and in small chunks, scored alone.
docs/reliability.md derives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ellm_sgl.client.generate import Output

EXACT = "float32"
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""u: rounding to the nearest changes a number x by at most u |x|."""
MEAN_FACTOR, LARGEST_FACTOR = 2.0, 4.0
"""Times stock's own rounding."""
MEAN_FLOOR, LARGEST_FLOOR = 0.5, 8.0
"""In u: what rounding a single logit of size 1 to 2 does on average, and one of 8 to 16 at most."""
LEAST_TOKENS = 64
"""So many at least tell how large rounding gets: of a tail that falls as exp(-x), the largest of n
exceeds LARGEST_FACTOR = 4 times the largest of n others with a probability of 24 / n^3."""
MOST_NOISE = 0.1
"""Stock's own mean from which on its rounding would hide errors."""


@dataclass(frozen=True)
class Spread:
    """|Δ log-probability| of scored tokens."""

    tokens: int
    mean: float
    largest: float

    @classmethod
    def of(cls, outputs: Iterable[Output], scores: Iterable[Sequence[float]]) -> Self:
        """`scores`: log-probability of each token of each output, told by stock SGLang. NaN where
        they are not as many as the output's own."""
        differences: list[float] = []
        for output, score in zip(outputs, scores, strict=True):
            if len(output.logprobs) == len(score):
                told = np.array(output.logprobs, np.float64)
                differences += np.abs(told - np.array(score, np.float64)).tolist()
            else:
                differences.append(math.nan)
        if not differences:
            return cls(0, math.nan, math.nan)
        return cls(len(differences), float(np.mean(differences)), float(np.max(differences)))

    @classmethod
    def larger(cls, one: Self | None, other: Self | None) -> Self | None:
        """What rounding comes to where both are rounding alone; None where one is missing."""
        if one is None or other is None:
            return None
        return cls(
            min(one.tokens, other.tokens),
            float(np.max([one.mean, other.mean])),
            float(np.max([one.largest, other.largest])),
        )


def bounds(noise: Spread, dtype: str) -> tuple[float, float]:
    """The largest mean and the largest difference that are accepted beside this noise."""
    u = UNIT_ROUNDOFF[dtype]
    return (
        max(MEAN_FACTOR * noise.mean, MEAN_FLOOR * u),
        max(LARGEST_FACTOR * noise.largest, LARGEST_FLOOR * u),
    )


def why_not_rounding(found: Spread | None, noise: Spread | None, dtype: str) -> str | None:
    """Why `found` cannot be taken for rounding; None if it can."""
    if found is None or noise is None:
        return "not scored by full caching"
    fewest = min(found.tokens, noise.tokens)
    if fewest < LEAST_TOKENS:
        return (
            f"{fewest} tokens scored; fewer than {LEAST_TOKENS} do not tell how large rounding is"
        )
    if not math.isfinite(noise.largest):
        return "log-probabilities of stock SGLang are no finite numbers"
    if noise.mean > MOST_NOISE:
        return (
            f"log-probabilities of stock SGLang differ by {noise.mean:.2g} on average between two "
            f"batch sizes: more than {MOST_NOISE} would hide errors"
        )
    limits = bounds(noise, dtype)
    for kind, value, limit in zip(
        ("on average", "at most"), (found.mean, found.largest), limits, strict=True
    ):
        if not value <= limit:
            return (
                f"log-probabilities differ from full caching's by {value:.2g} {kind}, and rounding "
                f"explains {limit:.2g}"
            )
    return None
