"""Every reason why a comparison proves nothing, or proves an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ellm_sgl.serve.verify.figures import LOGPROB_TOLERANCE, Comparison, Expected
from ellm_sgl.serve.verify.pairs import Pair
from ellm_sgl.serve.verify.rounding import EXACT, why_not_rounding

NOT_DONE = {
    "recomputed_tokens": "no token was recomputed",
    "evicted_units": "nothing was evicted",
    "fetched_units": "nothing was fetched from the host",
    "projected_units": "nothing was projected from hidden states",
    "retractions": "no request was retracted",
    "sat_out": "no request sat out",
    "aborted": "no stream was aborted in the middle",
}
"""What it means that a count of `Comparison` is 0."""


def why_no_proof(
    comparison: Comparison, pairs: Sequence[Pair], answered: int, expected: Expected
) -> Iterator[str]:
    """The reasons, most telling ones first.

    Args:
        answered: number of outputs, with and without a partner in the reference.
    """
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
    yield from _not_returned(expected)
    if undone := [NOT_DONE[name] for name in expected.needs if not getattr(comparison, name) > 0]:
        lengths = f"requests of at most {expected.most_tokens} tokens"
        yield f"exercised nothing: {' and '.join(undone)} with {lengths}"


def _first_of(
    pairs: Sequence[Pair], problem: Callable[[Pair], str | None], what: str
) -> Iterator[str]:
    """How many pairs have the problem, and what it is of the first one."""
    found = [(p.position, words) for p in pairs if (words := problem(p)) is not None]
    if found:
        position, words = found[0]
        yield f"{len(found)} of {len(pairs)} {what}, first output {position}: {words}"


def _not_returned(expected: Expected) -> Iterator[str]:
    """Memory that an idle server with an empty prefix cache still uses."""
    state = expected.idle
    if state is None:
        return
    if state["integrity"] != "ok":
        yield f"page table once idle: {state['integrity']}"
    for where in ("device", "host"):
        if used := state[f"{where}_units_total"] - state[f"{where}_units_free"]:
            yield f"{used} {where} units in use by nobody, once idle"
