"""What two servers that are busy by turns had of their memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ellm_sgl.budget import path_of
from ellm_sgl.client.division import ALONE, HALVES, SHARED, Division
from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.result import Result, Sample
from ellm_sgl.eval.bench.scenario import Setting
from ellm_sgl.eval.bench.scenarios import colocated
from ellm_sgl.eval.bench.scenarios.colocated import Colocated


@pytest.mark.parametrize(
    ("requests", "tokens"), [(24, 384), (1399, 1935), (64, 640), (2000, 50), (1, 100_000)]
)
@pytest.mark.parametrize("token_bytes", [1000, 4096, 113_033, 65536])
def test_both_always_have_a_floor_and_a_burst_fits_beside_the_other_s(
    requests: int, tokens: int, token_bytes: int
) -> None:
    granule = 2 << 20
    longest = -(-(tokens + 2) // 16) * 16  # whole blocks of a prompt a token or two longer
    found = Division.for_bursts(requests, tokens, token_bytes, granule)
    floor = -(-found.floor * token_bytes // granule)
    left = (found.nbytes // granule - floor) * granule
    assert left >= requests * longest * token_bytes + granule
    assert left < requests * (longest + 16) * token_bytes + 5 * granule  # and little more
    assert found.half * 2 <= found.tokens and found.tokens % 16 == found.floor % 16 == 0


def test_half_of_the_memory_is_too_little_for_a_burst_of_the_demo_s() -> None:
    found = Division.for_bursts(24, 384, 4096, 2 << 20)
    assert found.half < 0.7 * 24 * 384
    assert Division.of(1, 4096).tokens == 64
    shared = list(found.shared("demo"))
    assert f"demo:{found.nbytes}" in shared and shared[-1] == str(found.tokens)
    assert list(found.fixed(found.half)) == shared[: len(found.fixed(found.half))]


def test_which_pair_is_started_first_changes_by_turns() -> None:
    scenario = Colocated()
    first, second = list(scenario.starters()), list(scenario.starters())
    assert first == second[::-1] and set(first) == {ALONE, HALVES, SHARED}


def test_bursts_are_sent_by_turns_and_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, sent = Colocated(requests=2, output_tokens=3, bursts=2), []

    def served(where: str, requests: list[Request], setting: str) -> list[Outcome]:
        sent.append((where, setting, [r.prompt for r in requests]))
        return [
            Outcome(r, 0.0, [first, first + 0.2, first + 0.3], [7, 8, 9], "length")
            for r, first in zip(requests, (0.1, 0.2), strict=True)
        ]

    monkeypatch.setattr(loads, "served", served)
    pair, load = ("A", "B"), scenario.load("", 0)
    taken = scenario.measure(cast(Any, pair), Setting(SHARED, SHARED), load)
    assert [(where, name) for where, name, _ in sent] == [(w, SHARED) for w in "ABAB"]
    assert len({prompt for _, _, prompts in sent for prompt in prompts}) == 8
    assert taken.figures["tokens_per_s"] == pytest.approx(4 * 6 / (4 * 0.5))
    assert taken.figures["longest_pause"] == pytest.approx(0.2)
    assert taken.figures["ttft_mean"] == pytest.approx(0.15)
    assert taken.detail == {"seconds": [0.5] * 4} and len(taken.outputs) == 8


def test_a_budget_is_gone_with_the_servers_that_shared_it() -> None:
    file = path_of("bench-test")
    file.touch()

    def start() -> ServerProcess:
        raise RuntimeError("no server")

    with pytest.raises(RuntimeError, match="no server"), colocated._pair(start, "bench-test"):
        pass
    assert not file.exists()


def test_it_says_how_far_bursts_differ() -> None:
    def sample(name: str, ttft: float, *seconds: float) -> Sample:
        return Sample("", name, 0, {"ttft_p99": ttft}, {"seconds": seconds})

    samples = sample(ALONE, 0.5, 0.9, 1.1), sample(HALVES, 2.0, 1.0), sample(SHARED, 0.5, 1.0)
    told = Colocated().notes(Result(samples))
    assert told[0].endswith(": 0.25") and "14.1%" in told[1]
    assert Colocated().notes(Result(samples[:2])) == []
