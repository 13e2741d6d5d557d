"""The paper on elastic memory: the arithmetic of its memory, its loads and systems, what its rows
read off their runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ellm_sgl.eval.paper.elastic.claims import FIXED, HOST_BYTES, ONE, PAIR, SLO_SCALE, SMALL
from ellm_sgl.eval.paper.elastic.contradictions import contradictions
from ellm_sgl.eval.paper.elastic.machines import SHARING, kv_tokens, machine, row_bytes, row_tokens
from ellm_sgl.eval.paper.elastic.plan import APART, RELATIVE_LOADS, SYSTEMS, ElasticJob, plan, slos
from ellm_sgl.eval.paper.elastic.rows import Lines, decode, largest, rows, total
from ellm_sgl.eval.paper.jobs import Done, run_all
from ellm_sgl.eval.paper.measured import Measured, read_measured
from ellm_sgl.eval.paper.overheads import Lookup, Overheads
from ellm_sgl.eval.paper.results import Results
from ellm_sgl.eval.paper.row import Row
from ellm_sgl.eval.simulator import Settings

JOBS = plan(1.0, "roofline")


@pytest.fixture(scope="module")
def small() -> Results:
    """Runs of two or three requests."""
    done = run_all(plan(0.004, "roofline"), 1, lambda one: None)
    return Results(done, [], Overheads([], Lookup(0, 0, 0), {}), "roofline", 0.004, Measured())


def test_a_row_takes_hidden_state_residual_and_the_mlps_widest_point():
    assert row_bytes(machine(SMALL).shape) == 2 * (2 * 4096 + 3 * 14_336) == 102_400
    assert row_tokens(machine(SMALL)) == 102_400 / 131_072


def test_a_static_split_leaves_what_activations_of_the_longest_prefill_do_not_take():
    whole = kv_tokens(SMALL, "ellm")
    assert whole == pytest.approx((0.9 * 80e9 - 16.06e9) / 131_072, rel=1e-4)
    assert {kv_tokens(SMALL, system) for system in SHARING} == {whole}
    assert whole - kv_tokens(SMALL, "vllm") == pytest.approx(262_144 * 0.78125, abs=1)
    assert whole - kv_tokens(SMALL, "vllm-cp") == pytest.approx(512 * 0.78125, abs=1)
    # two 128k-8k requests do not fit into vLLM's share; three fit into all of it
    request = sum(FIXED["128k-8k"])
    assert kv_tokens(SMALL, "vllm") // request == 1 and whole // request == 3


def test_two_ranks_hold_the_weights_once_and_two_instances_twice():
    assert 3 < kv_tokens(PAIR, "vllm") / kv_tokens(ONE, APART) < 4
    assert kv_tokens(PAIR, "ellm") / kv_tokens(PAIR, "vllm") < 1.005
    assert machine(PAIR).host_tokens == int(HOST_BYTES[PAIR] // (2 * 40 * 5120 * 2))


def test_loads_are_those_of_the_paper_with_its_slos():
    for job in JOBS:
        load = job.load.draw()
        if job.load.data_set in FIXED:
            lengths = set(
                zip(load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)
            )
            assert lengths == {FIXED[job.load.data_set]}
        if job.figure == "elastic 11":
            assert not load.at_s.any() and np.isinf(load.ttft_slo_s).all()
        else:
            named = PAIR if job.machine == ONE else job.machine
            ttft, tpot = slos(named, job.load.data_set, "roofline")
            assert set(load.ttft_slo_s) == {ttft} and set(load.tpot_slo_s) == {tpot}
            assert job.settings.tpot_slo_s == tpot


def test_slos_are_of_a_request_alone():
    ttft, tpot = slos(SMALL, "2k-2k", "roofline")
    alone = next(j for j in JOBS if j.variant == "vllm" and j.load.data_set == "2k-2k")
    one = dataclasses.replace(alone.load, requests=1)
    summary = dataclasses.replace(alone, load=one).run().summary
    assert ttft == pytest.approx(SLO_SCALE * summary.ttft.mean, rel=0.01)
    assert tpot == pytest.approx(SLO_SCALE * summary.tpot.mean, rel=0.02)


def test_every_system_has_its_own_memory_and_way():
    runs = [j for j in JOBS if j.figure == "elastic 9" and j.load.data_set == "2k-2k"]
    assert {j.variant for j in runs} == set(SYSTEMS)
    for job in runs:
        assert isinstance(job, ElasticJob) and job.kv_tokens == kv_tokens(SMALL, job.variant)
        assert bool(job.settings.activation_tokens) == (job.variant in SHARING)
        assert job.settings.mixed_chunks == (job.settings.chunk_tokens == 512)
        assert job.settings.host_scaling == (job.variant == "ellm")
    assert [j.x for j in runs if j.variant == "ellm"] == list(RELATIVE_LOADS)


def elastic_9(small: Results) -> Lines:
    return Lines.of(small.of("elastic 9"), "2k-2k")


def test_goodput_needs_both_slos_at_every_lower_load(small: Results):
    def runs(*shares: float) -> Iterator[Done]:
        for done, share in zip(elastic_9(small).runs["vllm"], shares, strict=True):
            summary = dataclasses.replace(done.sim.summary, slo_attainment=share)
            yield Done(done.job, dataclasses.replace(done.sim, summary=summary))

    assert Lines({"vllm": [*runs(1, 0.9, 0.89, 1, 1)]}).goodput("vllm") == RELATIVE_LOADS[1]
    assert Lines({"vllm": [*runs(0.8, 1, 1, 1, 1)]}).goodput("vllm") == 0


def test_the_largest_ratio_is_found_with_its_load(small: Results):
    line = elastic_9(small).runs["vllm"]
    found = Lines({"a": line, "b": line}).most(lambda d: d.job.x if d.job.x == 2 else 1, "a", "b")
    assert found == (1.0, RELATIVE_LOADS[-1])


def test_offline_figures_are_of_all_tokens_and_of_decode_steps(small: Results):
    done = next(d for d in small.of("elastic 11") if d.job.load.data_set == "128k-8k")
    seconds = done.sim.summary.seconds
    assert total(done) == pytest.approx(2 * sum(FIXED["128k-8k"]) / seconds)
    assert largest(done) == 1
    assert decode(done) == pytest.approx(1 / done.sim.decode_step_s)


def test_rows_name_all_three_figures_and_what_the_paper_said(small: Results):
    table = list(rows(small))
    assert all(isinstance(row, Row) and row.why for row in table)
    for figure in ("Fig. 9(a)", "Fig. 9(e)", "Fig. 9(i)", "Fig. 10", "Fig. 11"):
        assert any(figure in row.where for row in table), figure
    said = {row.paper for row in table if row.paper is not None}
    assert said == {40.0, 295.0, 140.0, 2.5, 2.26, 1.5, 3.0, 1.82, 2.32}
    batch = next(row for row in table if row.paper == 3.0)
    assert batch.simulated == 2  # of two requests; of six it is three


def test_what_host_memory_brings_is_measured_on_servers(small: Results, tmp_path: Path):
    def ratio(figure: str, median: float) -> dict[str, object]:
        return {"setting": "rotating", "against": "plain", "figure": figure, "median": median}

    figures = {"ttft_mean": 0.25, "tokens_per_s": 0.84, "mean_under_way": 1.7}
    ratios = [ratio(*pair) for pair in figures.items()]
    path = tmp_path / "rotation.json"
    path.write_text(json.dumps({"bench": "rotation", "ratios": ratios}))
    table = list(rows(dataclasses.replace(small, measured=read_measured([path]))))
    measured = {row.quantity: row.measured for row in table if row.measured is not None}
    assert measured == {
        "mean TTFT of vllm-cp over eLLM's, at the most: 2k-2k": 4.0,
        "output tokens/s of eLLM over vLLM's, at the highest load: 2k-2k": 0.84,
    }
    assert any("1.70x the requests under way" in row.why for row in table)


def test_contradictions_name_the_arithmetic():
    text = " ".join(c.against for c in contradictions(Settings()))
    for figure in ("26.8 GB", "221,988", "426,388", "426,788", "0.1%", "1.15x", "1.92x", "0.4%"):
        assert figure in text, figure
