"""Generated workloads have the means that are asked for, and repeat by seed."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.client.replay import Request
from ellm_sgl.client.summary import goodput
from ellm_sgl.client.workloads import (
    LENGTHS,
    PAPER_GAP_S,
    PAPER_GAP_SD_S,
    PAPER_RATES,
    Lengths,
    LogNormal,
    gamma_arrivals,
    paper_workload,
    poisson_arrivals,
    sampled,
    to_requests,
)


@pytest.mark.parametrize("data_set", sorted(LENGTHS))
def test_drawn_lengths_have_the_papers_means(data_set):
    lengths = LENGTHS[data_set]
    drawn = lengths.draw(200_000, np.random.default_rng(0))
    for wanted, found in zip((lengths.prompt, lengths.output), drawn, strict=True):
        assert found.mean() == pytest.approx(wanted.mean, rel=0.02)
        assert found.min() >= 1 and found.max() <= wanted.longest


def test_prompt_and_output_end_with_the_context():
    prompts, outputs = LENGTHS["sharegpt"].draw(200_000, np.random.default_rng(0))
    assert (prompts + outputs).max() == 4096
    long = Lengths(LogNormal(80, 0.1, 99), LogNormal(5000, 1.0, 9000), context=100)
    prompts, outputs = long.draw(100, np.random.default_rng(0))
    assert (prompts + outputs == 100).mean() > 0.9


def test_gamma_gaps_have_the_rate_and_vary_as_the_papers_do():
    gaps = np.diff(gamma_arrivals(200_000, 50.0, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(PAPER_GAP_SD_S / PAPER_GAP_S, rel=0.02)


@pytest.mark.parametrize("data_set", sorted(LENGTHS))
def test_arrivals_have_the_papers_rate_of_the_data_set(data_set):
    at_s = paper_workload(data_set, 100_000, 0).at_s
    assert len(at_s) / at_s[-1] == pytest.approx(PAPER_RATES[data_set], rel=0.02)


def test_poisson_gaps_have_the_rate():
    times = poisson_arrivals(100_000, 20.0, np.random.default_rng(0))
    assert times[0] == 0 and times[-1] == pytest.approx(5000, rel=0.02)


def test_a_workload_repeats_by_seed_and_scales_by_rate():
    one, two = paper_workload("sharegpt", 50, 3), paper_workload("sharegpt", 50, 3)
    assert one.at_s.tolist() == two.at_s.tolist()
    assert one.prompt_tokens.tolist() == two.prompt_tokens.tolist()
    assert paper_workload("sharegpt", 50, 4).at_s.tolist() != one.at_s.tolist()
    slow = paper_workload("sharegpt", 50, 3, per_second=PAPER_RATES["sharegpt"] / 10)
    np.testing.assert_allclose(slow.at_s, 10 * one.at_s)


def test_pairs_of_a_file_stay_together():
    rng = np.random.default_rng(0)
    trace = sampled((np.array([1, 2]), np.array([10, 20])), np.arange(100.0), rng)
    assert (trace.output_tokens == 10 * trace.prompt_tokens).all()


def test_requests_have_the_traces_lengths():
    trace = paper_workload("sharegpt", 40, 0).scaled(lengths=0.2)
    requests = to_requests(trace, 1, tpot_slo_ms=50)
    assert [len(r.prompt) for r in requests] == trace.prompt_tokens.tolist()
    assert [r.output_tokens for r in requests] == trace.output_tokens.tolist()
    assert all(r.exact and r.tpot_slo_ms == 50 for r in requests)
    assert requests == to_requests(trace, 1, tpot_slo_ms=50)


def test_a_request_of_unknown_length_asks_for_a_bound():
    request = Request(0.0, "a list of values", 999, exact=False)
    assert request.body()["text"] == "a list of values"
    assert request.body()["sampling_params"]["max_new_tokens"] == 999
    assert "ignore_eos" not in request.openai_body("m")


def test_goodput_is_where_attainment_falls_below_what_is_wanted():
    def attainment(rate: float) -> float:
        return 1.0 if rate <= 3.3 else 0.0

    assert 3.3 / 1.05 <= goodput(attainment, 0.1, 10) <= 3.3
    assert goodput(attainment, 4, 10) == 0
    assert goodput(attainment, 1, 2) == 2
    with pytest.raises(ValueError, match="low"):
        goodput(attainment, 2, 1)
