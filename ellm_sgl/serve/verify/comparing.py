"""One setting's outputs against the reference's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ellm_sgl.client.generate import Output
from ellm_sgl.serve.verify.figures import Comparison, Expected
from ellm_sgl.serve.verify.pairs import pair_up
from ellm_sgl.serve.verify.reasons import why_no_proof
from ellm_sgl.serve.verify.rounding import EXACT, UNIT_ROUNDOFF


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
    pairs = list(pair_up(reference, outputs, asked, aborted))

    def gained(name: str) -> int:
        return int(after[name]) - int(before[name])

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
        recomputed_tokens=gained("recomputed_tokens_total"),
        evicted_units=gained("evicted_units_total"),
        fetched_units=gained("fetched_units_total"),
        projected_units=gained("projected_units_total"),
        retractions=gained("retractions_total"),
        sat_out=gained("sat_out_total"),
        aborted=sum(aborted),
        integrity=str(after["integrity"]),
    )
    reasons = why_no_proof(comparison, pairs, len(outputs), expected)
    return dataclasses.replace(comparison, failure="; ".join(reasons) or None)


def _largest(differences: Sequence[float]) -> float:
    """`max`, but NaN stays NaN wherever it comes."""
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
