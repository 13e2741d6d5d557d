"""The paper's loads and servers, as its section 6.1 states them."""

from __future__ import annotations

import pytest

from ellm_sgl.client.workloads import PAPER_RATES
from ellm_sgl.eval.paper.claims import CASES, CHAT_70B, LARGER, RELATIVE_LOADS, TPOT_SLO_S
from ellm_sgl.eval.paper.jobs import paper_machine
from ellm_sgl.eval.paper.plan import ADMISSIONS, BASELINES, SMALL, plan, unit_rates
from ellm_sgl.eval.simulator import MODES

JOBS = plan(1.0, "roofline")


def test_every_end_to_end_load_runs_every_baseline_with_every_admission():
    for case in (*CASES, SMALL):
        runs = {(j.settings.mode, j.settings.admission) for j in JOBS
                if j.figure == "10" and j.case == case}  # fmt: skip
        assert runs == {("ellm", "sglang"), *((m, a) for m in BASELINES for a in ADMISSIONS)}


def test_servers_and_requests_have_the_slos_of_table_1():
    for job in JOBS:
        assert (
            job.load.tpot_slo_s
            == job.settings.tpot_slo_s
            == TPOT_SLO_S.get(job.case, job.settings.tpot_slo_s)
        )


def test_loads_sweep_what_the_machine_can_serve():
    rates = unit_rates("roofline")
    for case in rates:
        for mode in MODES:
            asked = [j.load.per_second for j in JOBS
                     if (j.figure, j.case, j.variant) == ("14", case, mode)]  # fmt: skip
            assert asked == [x * rates[case] for x in RELATIVE_LOADS]
        assert 0 < rates[case] < PAPER_RATES[case[1]]


def test_the_larger_model_has_its_host_memory_and_outgrows_the_device():
    machine = paper_machine(LARGER)
    assert machine.host_tokens == 488281
    loads = [j.load for j in JOBS if j.case == CHAT_70B]
    assert {j.draw().prompt_tokens.size for j in loads} <= {j.requests for j in loads}
    for load in loads[:1]:
        drawn = load.draw()
        assert (drawn.prompt_tokens + drawn.output_tokens).sum() > 2 * machine.kv_tokens


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_scale_is_of_the_requests(scale):
    for one, job in zip(JOBS, plan(scale, "roofline"), strict=True):
        assert job.load.requests == max(round(one.load.requests * scale), 2)
