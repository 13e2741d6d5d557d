"""An output beside the reference's output to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ellm_sgl.client.generate import Output


@dataclass(frozen=True)
class Pair:
    """One output and what it should be."""

    position: int
    """In the load."""
    expected: Output
    got: Output
    asked: int
    """Tokens that were asked for."""
    aborted: bool
    """The client gave it up in the middle: what came by then is compared."""

    @property
    def tokens(self) -> int:
        """Tokens to be compared."""
        return len(self.got.token_ids) if self.aborted else self.asked

    @property
    def agreeing(self) -> int:
        """Tokens equal to the expected ones, up to the first that is not."""
        both = zip(self.expected.token_ids, self.got.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))

    @property
    def largest_difference(self) -> float:
        """Largest |Δ log-probability| of the agreeing tokens; NaN if it cannot be told."""
        both = zip(self.expected.logprobs, self.got.logprobs, strict=False)
        differences = [abs(a - b) for a, b in list(both)[: self.agreeing]]
        return math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)

    def incomplete(self) -> str | None:
        """What is missing of it, or too much; None if nothing is."""
        expected, got = len(self.expected.token_ids), len(self.got.token_ids)
        if self.asked < 1:
            return f"{self.asked} tokens asked for"
        if expected != self.asked:
            return f"reference has {expected} of {self.asked} tokens"
        if got > self.asked:
            return f"{got} tokens where {self.asked} were asked for"
        if got == 0 or (got < self.asked and not self.aborted):
            return f"{got} of {self.asked} tokens"
        for name, output in (("reference has ", self.expected), ("", self.got)):
            if len(output.logprobs) != len(output.token_ids):
                counts = f"{len(output.logprobs)} log-probabilities of {len(output.token_ids)}"
                return f"{name}{counts} tokens"
        return None

    def not_finite(self) -> str | None:
        """The first log-probability that is no finite number; None if all are."""
        for name, output in (("reference's ", self.expected), ("", self.got)):
            for i, value in enumerate(output.logprobs):
                if not math.isfinite(value):
                    return f"{name}log-probability of token {i} is {value}"
        return None

    def different(self) -> str | None:
        """Where it differs first; None if it does not."""
        i = self.agreeing
        if i >= self.tokens:
            return None
        tokens = (
            o.token_ids[i] if i < len(o.token_ids) else None for o in (self.got, self.expected)
        )
        return "token {} is {}, the reference's is {}".format(i, *tokens)


def pair_up(
    reference: Sequence[Output],
    outputs: Sequence[Output],
    asked: Sequence[int],
    aborted: Sequence[bool],
) -> Iterator[Pair]:
    """A pair for each position that has an output on both sides."""
    both = zip(reference, outputs, asked, aborted, strict=False)
    for position, (expected, got, tokens, given_up) in enumerate(both):
        yield Pair(position, expected, got, tokens, given_up)
