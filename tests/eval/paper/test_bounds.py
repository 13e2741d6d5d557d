"""What the paper's figures come to on its own machines."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.client.traces import Trace
from ellm_sgl.eval.paper.bounds import capacity, restorable
from ellm_sgl.eval.paper.claims import CHAT_13B, MAX_RUNNING, TPOT_SLO_S, UNCACHED
from ellm_sgl.eval.paper.contradictions import contradictions
from ellm_sgl.eval.paper.jobs import paper_machine
from ellm_sgl.eval.simulator import Load, Settings, simulate


def test_capacity_is_what_a_server_reaches_with_even_requests():
    """As many as fill memory, over and over, each of the mean length."""
    machine, count = paper_machine(CHAT_13B[0]), 300
    even = Trace(np.zeros(count), np.full(count, 222), np.full(count, 1346))
    report = simulate(machine, Settings("recompute", conservativeness=0.3), Load.of(even))
    served = count / report.summary.seconds
    assert capacity(machine, Settings(), "sharegpt") == pytest.approx(served, rel=0.3)


@pytest.mark.parametrize("case", sorted(UNCACHED))
def test_the_restorable_ratio_is_where_the_step_meets_the_slo(case):
    machine, slo_s = paper_machine(case[0]), TPOT_SLO_S[case]
    settings = Settings(max_running=MAX_RUNNING)
    found = restorable(machine, settings, case[1], UNCACHED[case], slo_s)
    assert 0 < found.ratio < UNCACHED[case] and found.step_s > slo_s
    again = restorable(machine, settings, case[1], UNCACHED[case], found.step_s)
    assert again.ratio == pytest.approx(UNCACHED[case], rel=1e-3)


def test_contradictions_name_the_arithmetic():
    text = " ".join(c.against for c in contradictions(Settings()))
    for figure in ("508", "328", "1.55x", "1.53x", "1.10x", "45.1", "62 PFLOP/s", "1.25", "4,610"):
        assert figure in text, figure
