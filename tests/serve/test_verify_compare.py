"""What `ellm-sgl verify` takes for a proof, and every way in which a comparison is none."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import pytest

from ellm_sgl.client.generate import Output
from ellm_sgl.serve.verify.comparing import compare
from ellm_sgl.serve.verify.figures import Comparison, Expected, VerifyReport

COUNTS = ("recomputed_tokens", "evicted_units", "fetched_units", "projected_units",
          "retractions", "pauses")  # fmt: skip
BEFORE = {f"{name}_total": 3 for name in COUNTS} | {"integrity": "ok"}
IDLE = {
    "integrity": "ok",
    "device_units_total": 8, "device_units_free": 8, "host_units_total": 4, "host_units_free": 4,
}  # fmt: skip


def output(*token_ids: int, logprobs: Sequence[float] | None = None) -> Output:
    return Output(
        token_ids, tuple(-0.1 * t for t in token_ids) if logprobs is None else (*logprobs,)
    )


REFERENCE = [output(1, 2, 3), output(4, 5, 6)]


def compared(
    outputs: Sequence[Output],
    reference: Sequence[Output] = REFERENCE,
    dtype: str = "float32",
    expected: Expected | None = None,
    **more: object,
) -> Comparison:
    after = {**BEFORE, "recomputed_tokens_total": 10, **more}
    if expected is None:  # as a caller who expects nothing else
        return compare(dtype, "r = 0.5", reference, outputs, BEFORE, after)
    return compare(dtype, "r = 0.5", reference, outputs, BEFORE, after, expected)


def fails(comparison: Comparison, *words: str) -> bool:
    """Whether it is no proof, says so in these words, and the report fails with it."""
    assert comparison.failure is not None
    for word in words:
        assert word in comparison.failure
    report = VerifyReport("m", 2, 3, (comparison,))
    assert report.failures == (f"{comparison.dtype}, r = 0.5: {comparison.failure}",)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["passed"] is False
    return not report.passed


def test_equal_outputs_are_a_proof() -> None:
    close = [output(1, 2, 3, logprobs=(-0.1, -0.20005, -0.3)), REFERENCE[1]]
    comparison = compared(close, expected=Expected(needs=("recomputed_tokens",), idle=IDLE))
    assert comparison.failure is None
    assert (comparison.agreeing, comparison.tokens, comparison.differing) == (6, 6, 0)
    assert comparison.max_logprob_difference == pytest.approx(5e-5)
    assert comparison.recomputed_tokens == 7
    assert VerifyReport("m", 2, 3, (comparison,), ("float32",)).passed


@pytest.mark.parametrize("outputs", [[], [output()]], ids=["no outputs", "no tokens"])
def test_nothing_compared_is_no_proof(outputs: list[Output]) -> None:
    comparison = compared(outputs, reference=outputs)
    assert comparison.agreement == 0.0
    assert fails(comparison, "nothing was compared")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "output"])
def test_a_log_probability_that_is_no_number_is_no_proof(value: float, side: str) -> None:
    odd = [output(1, 2, 3, logprobs=(-0.1, value, -0.3)), REFERENCE[1]]
    both = (REFERENCE, odd) if side == "reference" else (odd, REFERENCE)
    assert fails(compared(*both), "log-probability of token 1", "first output 0")


def test_a_log_probability_that_is_no_number_in_both_is_no_proof() -> None:
    odd = [output(1, 2, 3, logprobs=(math.inf, math.inf, math.inf)), REFERENCE[1]]
    assert fails(compared(odd, reference=odd), "no finite log-probabilities")


def test_fewer_outputs_than_the_reference_has_are_no_proof() -> None:
    comparison = compared(REFERENCE[:1])
    assert (comparison.agreeing, comparison.tokens) == (3, 6)
    assert fails(comparison, "1 outputs where the reference has 2")


def test_more_outputs_than_the_reference_has_are_no_proof() -> None:
    assert fails(compared([*REFERENCE, output(7, 8, 9)]), "3 outputs where the reference has 2")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [((4, 5), "2 of 3 tokens"), ((), "0 of 3 tokens"), ((4, 5, 6, 7), "4 tokens where 3 were")],
    ids=["short", "empty", "long"],
)
def test_an_output_of_another_length_is_no_proof(tokens: tuple[int, ...], words: str) -> None:
    assert fails(compared([REFERENCE[0], output(*tokens)]), "1 of 2 outputs", "output 1", words)


def test_a_reference_shorter_than_what_was_asked_for_is_no_proof() -> None:
    expected = Expected(asked=(3, 4))
    assert fails(compared(REFERENCE, expected=expected), "output 1: reference has 3 of 4 tokens")


def test_no_tokens_asked_for_is_no_proof() -> None:
    nothing = [output(), output()]
    expected = Expected(asked=(0, 0))
    assert fails(compared(nothing, nothing, expected=expected), "nothing was compared")


def test_log_probabilities_that_are_missing_are_no_proof() -> None:
    outputs = [output(1, 2, 3, logprobs=(-0.1,)), REFERENCE[1]]
    assert fails(compared(outputs), "1 log-probabilities of 3 tokens")


def test_another_token_is_no_proof() -> None:
    comparison = compared([REFERENCE[0], output(4, 9, 6)])
    assert (comparison.agreeing, comparison.tokens, comparison.differing) == (4, 6, 1)
    assert fails(
        comparison, "1 of 2 outputs differ", "output 1: token 1 is 9, the reference's is 5"
    )


def test_a_log_probability_too_far_off_is_no_proof() -> None:
    outputs = [REFERENCE[0], output(4, 5, 6, logprobs=(-0.4, -0.5002, -0.6))]
    assert fails(compared(outputs), "log-probabilities differ by 0.0002, more than 0.0001")


def test_an_inconsistent_page_table_is_no_proof() -> None:
    assert fails(
        compared(REFERENCE, integrity="missing_units is -4"), "page table: missing_units is -4"
    )


@pytest.mark.parametrize("where", ["device", "host"])
def test_memory_that_is_not_given_back_is_no_proof(where: str) -> None:
    expected = Expected(idle=IDLE | {f"{where}_units_free": 1})
    assert fails(compared(REFERENCE, expected=expected), f"{where} units in use by nobody")


def test_a_page_table_that_is_inconsistent_once_idle_is_no_proof() -> None:
    expected = Expected(idle=IDLE | {"integrity": "unit 3 is used twice"})
    assert fails(compared(REFERENCE, expected=expected), "once idle: unit 3 is used twice")


@pytest.mark.parametrize("name", [*COUNTS, "aborted"])
def test_a_setting_that_exercised_nothing_is_no_proof(name: str) -> None:
    expected = Expected(needs=(name,), most_tokens=33)
    comparison = compared(REFERENCE, expected=expected, recomputed_tokens_total=3)
    assert fails(comparison, "exercised nothing: no", "with requests of at most 33 tokens")


def test_an_aborted_stream_is_compared_as_far_as_it_came() -> None:
    expected = Expected(asked=(3, 3), aborted=(False, True), needs=("aborted",))
    comparison = compared([REFERENCE[0], output(4, 5)], expected=expected)
    assert comparison.failure is None
    assert (comparison.tokens, comparison.agreeing, comparison.aborted) == (5, 5, 1)
    other = compared([REFERENCE[0], output(4, 9)], expected=expected)
    assert fails(other, "1 of 2 outputs differ")


def test_an_aborted_stream_that_brought_nothing_is_no_proof() -> None:
    expected = Expected(aborted=(False, True))
    assert fails(compared([REFERENCE[0], output()], expected=expected), "0 of 3 tokens")


def test_a_dtype_without_a_criterion_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8'"):
        compared(REFERENCE, dtype="int8")


def test_a_report_without_comparisons_fails() -> None:
    assert not VerifyReport("m", 2, 3, ()).passed
    assert VerifyReport("m", 2, 3, ()).failures == ("nothing was compared",)


def test_a_dtype_that_was_asked_for_and_not_compared_fails() -> None:
    report = VerifyReport("m", 2, 3, (compared(REFERENCE),), ("float32", "bfloat16"))
    assert report.failures == ("bfloat16: nothing was compared",)


def test_one_failure_among_proofs_fails_the_report() -> None:
    proof = compared(REFERENCE)
    failed = dataclasses.replace(proof, setting="r = 0.9", failure="1 of 2 outputs differ")
    report = VerifyReport("m", 2, 3, (proof, failed, proof), ("float32",))
    assert report.failures == ("float32, r = 0.9: 1 of 2 outputs differ",)
