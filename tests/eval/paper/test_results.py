"""What the report reads off its runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ellm_sgl.eval.paper.claims import LONG_13B, LONG_70B
from ellm_sgl.eval.paper.end_to_end import _at_the_knee, under_load
from ellm_sgl.eval.paper.jobs import Done, Job, LoadSpec, run_job
from ellm_sgl.eval.paper.measured import Measured
from ellm_sgl.eval.paper.overheads import Lookup, Overheads
from ellm_sgl.eval.paper.parts import _links
from ellm_sgl.eval.paper.results import Comparison, Results, Sweep
from ellm_sgl.eval.paper.row import Row, over
from ellm_sgl.eval.simulator import Settings

JOB = Job("14", "ellm", LONG_13B[0], LoadSpec("sharegpt", 2), Settings())


@pytest.fixture(scope="module")
def some() -> Done:
    return run_job(JOB)


def at(some: Done, x: float, variant: str = "ellm", **figures: Any) -> Done:
    """A run at a place, some of its figures changed."""
    ttft = dataclasses.replace(some.sim.summary.ttft, mean=figures.pop("ttft", 1.0))
    summary = dataclasses.replace(some.sim.summary, ttft=ttft, **figures)
    job = dataclasses.replace(JOB, x=x, variant=variant)
    return Done(job, dataclasses.replace(some.sim, summary=summary))


def test_the_knee_is_the_last_load_before_ttft_doubles(some):
    times = (1.0, 1.9, 2.1, 1.5)
    runs = [at(some, x, ttft=t) for x, t in zip((0.5, 1.0, 1.5, 2.0), times, strict=True)]
    assert Sweep(LONG_13B, "ellm", runs).knee == 1.0


def test_goodput_is_the_last_load_that_nine_in_ten_are_within_the_slo(some):
    runs = [at(some, x, tpot_attainment=a) for x, a in ((0.5, 0.95), (1.0, 0.9), (1.5, 0.89))]
    assert Sweep(LONG_13B, "ellm", runs).goodput == 1.0
    assert Sweep(LONG_13B, "ellm", runs[2:]).goodput == 0.0


def test_of_the_knees_and_the_highest_load_the_text_says_more(some):
    def sweep(case: Any, knee: float) -> Sweep:
        ttft = {x: 1.0 if x <= knee else 9.0 for x in (0.5, 1.0, 1.5, 2.0)}
        return Sweep(case, "-", [at(some, x, ttft=ttft[x], tpot_attainment=0.9) for x in ttft])

    (row,) = _at_the_knee(sweep(LONG_70B, 1.5), [sweep(LONG_70B, x) for x in (1.0, 0.5)])
    assert (row.where, row.paper, row.simulated) == ("§6.4", 1.25, 1.5)
    (row,) = _at_the_knee(sweep(LONG_13B, 1.5), [sweep(LONG_13B, 1.0)])
    assert (row.quantity[:38], row.paper) == ("requests within the TPOT SLO at 2 x, e", 90)
    assert row.simulated == pytest.approx(90)


def test_sglangs_admission_is_judged_at_the_better_of_its_settings(some):
    runs = [at(some, 1.0, "swap, sglang", slo_tokens_per_s=5.0),
            at(some, 0.3, "swap, sglang", slo_tokens_per_s=7.0),
            at(some, 0.0, "swap, paper", slo_tokens_per_s=9.0)]  # fmt: skip
    compared = Comparison(LONG_13B, runs)
    assert compared.baseline("swap", "sglang") is runs[1]
    assert compared.baseline("swap") is runs[2]


def test_communication_takes_what_the_latency_model_says_and_no_more():
    def share(latency_model: str) -> float | None:
        results = Results(
            [], [], Overheads([], Lookup(0, 0, 0), {}), latency_model, 1.0, Measured()
        )
        return next(r.simulated for r in _links(results) if r.quantity.startswith("communication"))

    assert share("roofline") == pytest.approx(48.7, abs=0.1)
    assert share("paper") == pytest.approx(0.0, abs=1e-9), "it counts operations only"


def test_what_is_not_known_is_shown_as_nothing():
    row = Row("§1", "tokens/s", None, 2.0, None, "", "x")
    assert (row.cell(row.simulated), row.cell(row.measured), row.ratio(2.0)) == ("2x", "–", "")
    assert Row("§1", "tokens/s", 4.0, 2.0).ratio(2.0) == "0.50"
    assert over(1.0, 0.0) is None


def test_goodput_over_none_is_not_taken_for_a_ratio() -> None:
    measured = Measured(goodputs=((6.0, 0.0), (7.0, 0.0), (8.0, 6.0)))
    results = Results([], [], Overheads([], Lookup(0, 0, 0), {}), "roofline", 1.0, measured)
    (row,) = (r for r in under_load(results) if "goodput of eLLM over stock" in r.quantity)
    assert row.measured is None and "In 2 of 3 seeds stock's is 0." in row.why
