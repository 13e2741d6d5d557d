"""The criterion for 16-bit KV: what may be taken for rounding, and what may not."""

from __future__ import annotations

import math

import pytest

from ellm_sgl.client.generate import Output
from ellm_sgl.serve.verify.comparing import compare
from ellm_sgl.serve.verify.figures import Expected, VerifyReport
from ellm_sgl.serve.verify.rounding import UNIT_ROUNDOFF, Spread, bounds, why_not_rounding

NOISE = Spread(288, 0.00118, 0.0215)
"""Stock SGLang on the demo model in bfloat16."""
STATE = dict.fromkeys(
    (f"{name}_total" for name in ("recomputed_tokens", "evicted_units", "fetched_units",
                                  "projected_units", "retractions", "pauses")), 0,
) | {"integrity": "ok"}  # fmt: skip


def test_as_much_as_stock_is_rounding() -> None:
    assert why_not_rounding(NOISE, NOISE, "bfloat16") is None


def test_twice_the_mean_and_four_times_the_largest_are_the_bounds() -> None:
    assert bounds(NOISE, "bfloat16") == (2 * 0.00118, 4 * 0.0215)
    within = Spread(288, 2 * 0.00118, 4 * 0.0215)
    assert why_not_rounding(within, NOISE, "bfloat16") is None
    mean = why_not_rounding(Spread(288, 0.0024, 0.05), NOISE, "bfloat16")
    assert mean is not None and "by 0.0024 on average" in mean
    largest = why_not_rounding(Spread(288, 0.0012, 0.0861), NOISE, "bfloat16")
    assert largest is not None and "by 0.086 at most" in largest


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_where_stock_does_not_round_one_rounding_of_a_logit_is_accepted(dtype: str) -> None:
    u, none = UNIT_ROUNDOFF[dtype], Spread(288, 0.0, 0.0)
    assert why_not_rounding(Spread(288, u / 2, 8 * u), none, dtype) is None
    assert why_not_rounding(Spread(288, u / 2, 8.1 * u), none, dtype) is not None
    assert why_not_rounding(Spread(288, 0.51 * u, 8 * u), none, dtype) is not None


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_no_number_is_not_rounding(odd: float) -> None:
    for found, noise in (
        (Spread(288, odd, 0.01), NOISE),
        (Spread(288, 0.001, odd), NOISE),
        (Spread(288, 0.001, 0.01), Spread(288, odd, odd)),
    ):
        assert why_not_rounding(found, noise, "bfloat16") is not None


def test_a_noise_whose_largest_is_no_number_bounds_nothing() -> None:
    assert why_not_rounding(NOISE, Spread(288, 0.001, math.inf), "bfloat16") is not None
    assert why_not_rounding(NOISE, Spread(288, 0.001, math.nan), "bfloat16") is not None


def test_rounding_is_the_larger_of_two_measures() -> None:
    whole, parts = Spread(288, 0.0008, 0.028), Spread(290, 0.0019, 0.026)
    assert Spread.larger(whole, parts) == Spread.larger(parts, whole) == Spread(288, 0.0019, 0.028)
    assert Spread.larger(whole, None) is None
    odd = Spread.larger(whole, Spread(288, math.nan, 0.01))
    assert odd is not None and why_not_rounding(NOISE, odd, "bfloat16") is not None


def test_noise_that_would_hide_errors_proves_nothing() -> None:
    why = why_not_rounding(NOISE, Spread(288, 0.2, 3.0), "bfloat16")
    assert why is not None and "would hide errors" in why


def test_a_few_tokens_prove_nothing() -> None:
    few = Spread(63, 0.001, 0.01)
    for found, noise in ((few, NOISE), (NOISE, few), (Spread.of([], []), NOISE)):
        why = why_not_rounding(found, noise, "float16")
        assert why is not None and "tokens scored" in why


def test_differences_are_over_all_tokens() -> None:
    outputs = [Output((1, 2), (-0.5, -1.0)), Output((3,), (-0.25,))]
    spread = Spread.of(outputs, [(-0.5, -1.5), (-0.5,)])
    assert (spread.tokens, spread.largest) == (3, 0.5) and spread.mean == pytest.approx(0.25)


def test_scores_that_are_not_as_many_as_the_tokens_are_no_number() -> None:
    spread = Spread.of([Output((1, 2), (-0.5, -1.0))], [(-0.5,)])
    assert math.isnan(spread.mean) and math.isnan(spread.largest)


@pytest.mark.parametrize("dtype", UNIT_ROUNDOFF)
def test_in_16_bits_tokens_are_not_the_criterion(dtype: str) -> None:
    """A near tie that tips is no error; equal tokens whose log-probabilities nobody has scored are
    no proof, nor are those that came from other KV."""
    reference = [Output((1, 2, 3), (-0.1, -0.2, -0.3))]
    tipped = [Output((1, 9, 8), (-0.1, -0.21, -0.3))]
    scored = Expected(forced=NOISE, noise=NOISE)
    proof = compare(dtype, "r = 0.5", reference, tipped, STATE, STATE, scored)
    assert proof.failure is None and proof.agreeing == 1
    assert VerifyReport("m", 1, 3, (proof,), (dtype,)).passed
    unscored = compare(dtype, "r = 0.5", reference, reference, STATE, STATE)
    assert unscored.failure == "not scored by full caching"
    other = Expected(forced=Spread(288, 0.3, 4.0), noise=NOISE)
    stale = compare(dtype, "r = 0.5", reference, reference, STATE, STATE, other)
    assert stale.failure is not None and "rounding explains" in stale.failure
    assert not VerifyReport("m", 1, 3, (unscored,)).passed
    assert not VerifyReport("m", 1, 3, (stale,)).passed
