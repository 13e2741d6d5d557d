"""The kit finds what it is there to find: one bad policy per rule, and fails no good one."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import (
    Batch,
    EndedRequest,
    Fcfs,
    FixedRatio,
    Policy,
    Ratios,
    Stock,
    SystemState,
    WorkSplit,
)
from ellm_sgl.policies.planned import evictable_tokens
from ellm_sgl.policies.testing import (
    CHECKS,
    ConformanceReport,
    check_policy,
    examine,
    generate,
)
from ellm_sgl.policies.testing.checks import Subject, told_of
from ellm_sgl.policies.testing.starvation import BLOCK_TOKENS, Kind, Scene, Server

STATES = 25


class Uniform(Stock):
    """The same share of all running requests' blocks is evicted, just enough for what lacks."""

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        running, memory = state.running, state.memory
        most = evictable_tokens(running, memory.block_tokens)
        lacking = running.uncached_tokens.sum() - memory.device_free_tokens
        share = lacking / (1.0 - memory.staging_overhead) / max(1, most.sum())
        tokens = np.clip(share, 0.0, 1.0) * most
        blocks = np.ceil(tokens / memory.block_tokens)
        ratios = np.where(blocks > 0, (blocks * memory.block_tokens + 0.5) / running.tokens, 0.0)
        return Ratios(ratios, np.zeros(len(batch.admit)))


@pytest.mark.parametrize("policy", [Stock, FixedRatio, lambda: FixedRatio(0.5), FixedRatio(0.25)])
def test_policies_that_do_not_adapt_keep_the_rules(policy: Any) -> None:
    report = check_policy(policy, states=STATES, budget_ms=None)
    skipped = {r.name: r.detail for r in report.results if r.outcome == "skipped"}
    expected = {"answers-in-time", "targets-fit-the-device"}
    assert skipped.keys() - {"idle-without-pressure"} == expected
    assert "do not depend on memory" in skipped["targets-fit-the-device"]


def test_a_policy_that_adapts_is_asked_to_fit() -> None:
    report = check_policy(Uniform, states=STATES, budget_ms=1000.0)
    expected = {name: "passed" for name in CHECKS} | {"idle-without-pressure": "skipped"}
    assert {r.name: r.outcome for r in report.results} == expected


class PromisesToo(Stock):
    """Evicts something however much room there is."""

    def idle_without_pressure(self) -> bool:
        return True

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(np.full(len(state.running), 0.25), np.zeros(len(batch.admit)))


def test_a_subclass_with_answers_of_its_own_promises_nothing() -> None:
    class Quiet(Stock):
        pass

    assert Stock().idle_without_pressure() and Quiet().idle_without_pressure()
    assert Fcfs().idle_without_pressure() and Fcfs(rotate=False).idle_without_pressure()
    assert FixedRatio(0.0).idle_without_pressure() and not FixedRatio(0.5).idle_without_pressure()
    assert not Uniform().idle_without_pressure()


class Raises(Stock):
    def batch(self, state: SystemState) -> Batch:
        if len(state.waiting) == 0:
            raise RuntimeError("nobody waits")
        return super().batch(state)


class AdmitsMinusOne(Stock):
    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=(-1,))


class Nan(Stock):
    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(state.running.tpot_s * 0.0, np.zeros(len(batch.admit)))


class Two(Stock):
    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(np.full(len(state.running), 2.0), np.zeros(len(batch.admit)))


class OddThreads(Stock):
    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return WorkSplit(1, 1, 100)


class Learns(Stock):
    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        state.latency.observe(plan, 1.0)
        return super().split(state, plan)


class Writes(Stock):
    def batch(self, state: SystemState) -> Batch:
        state.running.tokens.setflags(write=True)
        return super().batch(state)


class Random(Stock):
    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return WorkSplit(1, 1, 32 * random.randint(1, 31))


class MoreMemoryEvictsMore(Stock):
    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        ample = state.memory.device_tokens > state.running.tokens.sum()
        share = 0.9 if ample else 0.8
        most = np.minimum(share, 1.0 - 1.0 / state.running.tokens)
        return Ratios(most, np.zeros(len(batch.admit)))


class EvictsTooLittle(Uniform):
    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        ratios = super().ratio(state, batch)
        return Ratios(ratios.running * 0.8, ratios.admitted)


class ShortestFirst(Stock):
    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=tuple(np.argsort(state.waiting.tokens, kind="stable").tolist()))


class NewestFirst(Stock):
    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=tuple(reversed(range(len(state.waiting)))))


class UrgentOnly(Stock):
    """Lets none but the most urgent requests decode."""

    def batch(self, state: SystemState) -> Batch:
        priority = state.running.priority
        pause = np.flatnonzero(priority < priority.max(initial=-99)).tolist()
        return Batch(admit=super().batch(state).admit, pause=tuple(pause))


class AdmitsNobody(Stock):
    def batch(self, state: SystemState) -> Batch:
        return Batch(admit=())


class ForgetsTheUnknown(Stock):
    """Takes every request that ends for one that it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}

    def batch(self, state: SystemState) -> Batch:
        self.known |= dict.fromkeys(state.running.request_id.tolist(), 0)
        return super().batch(state)

    def ended(self, request: EndedRequest) -> None:
        del self.known[request.request_id]


class ClosesBadly(Stock):
    def close(self) -> None:
        raise OSError("no such file")


@pytest.mark.parametrize(
    ("policy", "check", "told"),
    [
        (Raises, "answers-are-valid", "RuntimeError: nobody waits; state: .* 0 waiting"),
        (AdmitsMinusOne, "answers-are-valid", "admit has -1"),
        (Nan, "answers-are-valid", "is nan"),
        (Two, "answers-are-valid", r"running\[0\] is 2"),
        (OddThreads, "answers-are-valid", "delta is 100"),
        (Learns, "state-is-left-alone", "calls latency.observe"),
        (Writes, "state-is-left-alone", "changed state.running.tokens"),
        (Random, "same-history-same-answers", "two instances with one history disagree"),
        (MoreMemoryEvictsMore, "more-memory-never-less-cached", "of the memory needed it leaves"),
        (EvictsTooLittle, "targets-fit-the-device", "device tokens too few"),
        (ShortestFirst, "nobody-starves", "900 tokens, .* its first token, .*long requests in"),
        (NewestFirst, "nobody-starves", "has waited 60. s for its first token"),
        (UrgentOnly, "nobody-starves", "for its next token"),
        (PromisesToo, "idle-without-pressure", "is idle without pressure, but pauses 0 and leaves"),
        (ForgetsTheUnknown, "hears-of-the-end", "KeyError: 1000000000; state: .* then ends"),
        (ClosesBadly, "hears-of-the-end", "OSError: no such file"),
        (AdmitsNobody, "answers-are-valid", "admit is empty while nothing runs"),
    ],
)
def test_a_bad_policy_fails(policy: type[Policy], check: str, told: str) -> None:
    with pytest.raises(Exception) as failure:  # noqa: PT011 (whatever it is, it is told)
        CHECKS[check](Subject.of(policy, STATES, None))
    assert re.search(told, told_of(failure.value), re.DOTALL)


def test_policy_rule_and_state_are_told() -> None:
    told = r"(?s)AdmitsMinusOne fails .*  answers-are-valid: .*admit has -1"
    with pytest.raises(AssertionError, match=told):
        check_policy(AdmitsMinusOne, states=STATES, budget_ms=None)


@pytest.mark.parametrize("policy", [Random, EvictsTooLittle, ShortestFirst])
def test_only_the_broken_rule_is_named(policy: type[Policy]) -> None:
    assert len(examine(policy, states=STATES, budget_ms=None).failures) == 1


def test_the_few_run_when_the_stream_starts_and_nothing_of_one_that_pauses_is_restored() -> None:
    class PausesTheLast(Stock):
        def batch(self, state: SystemState) -> Batch:
            last = (len(state.running) - 1,) if len(state.running) > 1 else ()
            return Batch(super().batch(state).admit, pause=last)

    few, stream = Kind(64, 99, priority=-1), Kind(64, 9)
    server = Server(PausesTheLast(), Scene("", few, stream, head_start=4))
    for _ in range(4):
        server.step()
    assert [r.kind for r in server.running] == [few] * 3 and not server.waiting
    last = server.running[-1]
    last.uncached = BLOCK_TOKENS
    server.step()
    assert last.uncached == BLOCK_TOKENS
    assert {r.kind for r in server.running[3:] + server.waiting} == {stream}


class Late(Stock):
    """When it is busy, as the state that the kit times is."""

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        if len(state.waiting) == 1024:
            time.sleep(0.02)
        return super().ratio(state, batch)


def test_late_answers_fail() -> None:
    report = examine(Late, states=1, budget_ms=10.0)
    assert [failure.name for failure in report.failures] == ["answers-in-time"]
    assert "the budget is 10 ms: 256 running, 1024 waiting" in report.failures[0].detail


def test_hopelessly_late_answers_skip_the_rest() -> None:
    report = examine(Late, states=100_000, budget_ms=0.5)
    outcomes = [r.outcome for r in report.results]
    assert outcomes == ["failed"] + ["skipped"] * (len(CHECKS) - 1)


def test_a_failing_state_can_be_made_again() -> None:
    names = {"generate": generate, "default_rng": np.random.default_rng, "Size": generate.Size}
    detail = examine(Two, states=STATES, budget_ms=None).failures[0].detail
    state = eval(detail.rpartition("; ")[2], names)
    assert f"{len(state.running)} (of {state.running.tokens.min():,} to " in detail


def test_an_instance_is_copied_not_used() -> None:
    class Counts(Stock):
        asked = 0

        def batch(self, state: SystemState) -> Batch:
            self.asked += 1
            return super().batch(state)

    policy = Counts()
    check_policy(policy, states=3, budget_ms=None)
    assert policy.asked == 0


def test_global_random_state_is_put_back() -> None:
    random.seed(3)
    first = random.random()
    random.seed(3)
    examine(Stock, states=3, budget_ms=None)
    assert random.random() == first


def test_json_tells_every_check() -> None:
    report: ConformanceReport = examine(Two, states=3, budget_ms=None)
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is False and document["policy"] == "Two"
    assert [c["name"] for c in document["checks"]] == list(CHECKS)
