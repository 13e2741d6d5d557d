"""Two classes of requests, simulated: what is drawn, and what the urgent gain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ellm_sgl.eval.bench.runner import run
from ellm_sgl.eval.bench.scenarios.mixed_load import OURS, SLOS, URGENT, Cell, MixedLoad

CELL = Cell("llama2-13b", "documents", 1.0, "told")


def test_a_load_has_both_classes_at_the_rate_asked_for() -> None:
    made = MixedLoad(requests=50, urgent_share=0.3)
    load, again, other = (made.load(CELL, seed).requests for seed in (1, 1, 2))
    assert len(load) == 50 and (np.diff(load.at_s) >= 0).all()
    assert np.array_equal(load.at_s, again.at_s) and not np.array_equal(load.at_s, other.at_s)
    urgent = load.priority == URGENT
    assert urgent.sum() == 15
    assert len(set(load.tpot_slo_s[urgent])) == 1 and np.isinf(load.tpot_slo_s[~urgent]).all()
    twice = dataclasses.replace(made, load_factor=2.0).load(CELL, 1).requests
    assert twice.at_s[-1] == pytest.approx(load.at_s[-1] / 2)


def test_memory_is_a_share_of_the_machines() -> None:
    made = MixedLoad(requests=10)
    whole, part = (made.load(CELL._replace(memory=m), 0).machine.kv_tokens for m in (1.0, 0.5))
    assert part == whole // 2
    assert MixedLoad(machines=("llama3-8b",), others=("answers",)).cells() == tuple(
        Cell("llama3-8b", "answers", memory, slo) for memory in (1.0, 0.3) for slo in SLOS
    )


def test_an_slo_is_told_or_not() -> None:
    made = MixedLoad(requests=10)
    told, none = (made.load(CELL._replace(slo=slo), 0).requests for slo in SLOS)
    assert told.at_s.tolist() == none.at_s.tolist() and np.isinf(none.tpot_slo_s).all()


class Part(MixedLoad):
    def cells(self) -> tuple[Cell, ...]:
        return CELL, CELL._replace(others="answers"), CELL._replace(slo="none")


@pytest.mark.slow
def test_the_urgent_gain_and_little_is_lost() -> None:
    """By medians of so many rounds that another processor's last digits, after which a simulated
    load goes another way, do not decide it."""
    made = Part(rounds=5, requests=120)
    result = run(made, lambda _: None, lambda: None)
    for cell in made.cells():
        ratio = {
            figure: result.ratio(cell, OURS, "fcfs", figure).median
            for figure in ("tokens_per_s", "urgent_ttft_p99", "urgent_tpot_p99")
        }
        assert ratio["urgent_ttft_p99"] <= 0.5
        if cell.slo == "told":
            assert ratio["tokens_per_s"] >= 0.95
            assert result.median(cell, OURS, "urgent_attainment") >= 0.95
        else:  # the urgent's speed is bought with the long prompts of the others
            assert ratio["tokens_per_s"] >= 0.85 and ratio["urgent_tpot_p99"] <= 0.6
        for figure in ("ttft_p99", "tpot_p99"):
            by = [result.median(cell, OURS, f"{who}_{figure}") for who in ("urgent", "alone")]
            assert by[0] >= by[1]
