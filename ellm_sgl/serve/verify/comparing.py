"""One setting's outputs against the reference's: what was found, and every reason why it proves
nothing, or proves an error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ellm_sgl.client.generate import UNDER_WAY, Output
from ellm_sgl.serve.verify.figures import LOGPROB_TOLERANCE, Comparison, Expected
from ellm_sgl.serve.verify.rounding import EXACT, UNIT_ROUNDOFF, why_not_rounding

NOT_DONE = {
    "recomputed_tokens": "no token was recomputed",
    "evicted_units": "nothing was evicted",
    "fetched_units": "nothing was fetched from the host",
    "projected_units": "nothing was projected from hidden states",
    "stored_tokens": "nothing was read from the store on disk",
    "retractions": "no request was retracted",
    "pauses": "no request was paused",
    "aborted": "no stream was aborted in the middle",
    "resized": "the pool never came to another size",
}
"""What it means that a count of `Comparison` is 0."""


@dataclass(frozen=True)
class Pair:
    """One output, and the reference's output to the same prompt."""

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
        return _largest([abs(a - b) for a, b in list(both)[: self.agreeing]])

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
        got, expected = (dict(enumerate(o.token_ids)).get(i) for o in (self.got, self.expected))
        return f"token {i} is {got}, the reference's is {expected}"


def compare(
    dtype: str,
    setting: str,
    reference: Sequence[Output],
    outputs: Sequence[Output],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    expected: Expected | None = None,
) -> Comparison:
    """Compare token by token, and say in `failure` what is wrong.

    Args:
        before, after: the server's state around the run.

    Raises:
        ValueError: a dtype for which there is no criterion.
    """
    if dtype != EXACT and dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype must be {EXACT} or one of {tuple(UNIT_ROUNDOFF)}, got {dtype!r}")
    expected = expected or Expected()
    asked = expected.asked or [len(o.token_ids) for o in reference]
    aborted = expected.aborted or [False] * len(outputs)
    both = zip(reference, outputs, asked, aborted, strict=False)
    pairs = [Pair(*each) for each in both]
    others = {"aborted", "resized", "stored_tokens"}  # the client's, and the store's
    servers = NOT_DONE.keys() - others
    counts = {n: int(after[f"{n}_total"]) - int(before[f"{n}_total"]) for n in servers}
    comparison = Comparison(
        dtype=dtype,
        setting=setting,
        failure=None,
        outputs=len(reference),
        differing=sum(p.different() is not None for p in pairs),
        tokens=sum(p.tokens for p in pairs) + sum(asked[len(pairs) :]),
        agreeing=sum(p.agreeing for p in pairs),
        max_logprob_difference=_largest([p.largest_difference for p in pairs if p.agreeing]),
        forced=expected.forced,
        noise=expected.noise,
        **counts,
        stored_tokens=_stored(after) - _stored(before),
        aborted=sum(aborted),
        resized=expected.resizes.get("applied", 0),
        at_floor=sum(expected.resizes.get(name, 0) for name in ("floor", "ceiling")),
        overtaken=expected.resizes.get(UNDER_WAY, 0),
        integrity=str(after["integrity"]),
    )
    reasons = _why_no_proof(comparison, pairs, len(outputs), expected)
    return dataclasses.replace(comparison, failure="; ".join(reasons) or None)


def _stored(state: Mapping[str, Any]) -> int:
    """Tokens that a server has read from its store; 0 without one."""
    return int((state.get("kv_store") or {}).get("fetched_tokens_total", 0))


def _largest(differences: Sequence[float]) -> float:
    """`max`, but NaN stays NaN wherever it comes."""
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)


def _why_no_proof(
    comparison: Comparison, pairs: Sequence[Pair], answered: int, expected: Expected
) -> Iterator[str]:
    """The reasons, most telling ones first; `answered` counts outputs without a partner as well."""
    if comparison.tokens == 0:
        yield "nothing was compared: no tokens"
    if answered != comparison.outputs:
        yield f"{answered} outputs where the reference has {comparison.outputs}"
    yield from _first_of(pairs, Pair.incomplete, "outputs are not what was asked for")
    yield from _first_of(pairs, Pair.not_finite, "outputs have no finite log-probabilities")
    if comparison.dtype == EXACT:
        yield from _first_of(pairs, Pair.different, "outputs differ")
        if comparison.max_logprob_difference > LOGPROB_TOLERANCE:
            largest = comparison.max_logprob_difference
            yield f"log-probabilities differ by {largest:.2g}, more than {LOGPROB_TOLERANCE:g}"
    elif reason := why_not_rounding(comparison.forced, comparison.noise, comparison.dtype):
        yield reason
    if comparison.integrity != "ok":
        yield f"page table: {comparison.integrity}"
    if expected.idle is not None:
        yield from _not_returned(expected.idle)
    if undone := [NOT_DONE[name] for name in expected.needs if not getattr(comparison, name) > 0]:
        lengths = f"requests of at most {expected.most_tokens} tokens"
        yield f"exercised nothing: {' and '.join(undone)} with {lengths}"


def _first_of(
    pairs: Sequence[Pair], problem: Callable[[Pair], str | None], what: str
) -> Iterator[str]:
    """How many pairs have the problem, and what it is of the first one."""
    found = [(i, words) for i, p in enumerate(pairs) if (words := problem(p)) is not None]
    if found:
        position, words = found[0]
        yield f"{len(found)} of {len(pairs)} {what}, first output {position}: {words}"


def _not_returned(state: Mapping[str, Any]) -> Iterator[str]:
    """Memory that an idle server with an empty prefix cache still uses."""
    if state["integrity"] != "ok":
        yield f"page table once idle: {state['integrity']}"
    for where in ("device", "host"):
        if used := state[f"{where}_units_total"] - state[f"{where}_units_free"]:
            yield f"{used} {where} units in use by nobody, once idle"
