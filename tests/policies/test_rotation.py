"""Rotation: arithmetic, and a loop of steps in plain numbers in which SLOs must hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ellm_sgl.latency import HardwareProfile, LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies import Policy, SystemState
from ellm_sgl.policies.checks import check_batch, check_ratios
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.pausing.limits import LINK_SHARE, Deadlines, can_rotate
from ellm_sgl.policies.pausing.rotation import _worth_it
from ellm_sgl.policies.planned import planned_tokens
from ellm_sgl.policies.problem.candidates import SLO_SHARE
from ellm_sgl.policies.slo_priority import SloPriority, levels
from ellm_sgl.policies.testing import PROFILES, SHAPES, make_state, requests

pytestmark = pytest.mark.slow

BLOCK = 16
SLO_S = 0.060
STEP_S, ROW_S, PREFILL_ROW_S = 0.008, 0.0002, 0.0001


class Linear(LatencyModel):
    def step_seconds(self, work: StepWork) -> FloatArray:
        rows = ROW_S * work.decode_rows + PREFILL_ROW_S * (work.prefill_rows + work.restored_tokens)
        return np.asarray(STEP_S + rows)

    def observe(self, work: StepWork, seconds: float) -> None:
        raise AssertionError("a policy must not calibrate the model")


@dataclass
class One:
    """A request of the loop below."""

    number: int
    prompt: int
    output: int
    at_s: float
    priority: int = 0
    tokens: int = 0
    missing: int = 0
    first_s: float = np.nan
    last_s: float = np.nan
    done: list[float] = field(default_factory=list)


class Loop:
    """A server in plain numbers: blocks, a link, steps that take what the model says."""

    def __init__(self, policy: Policy, device: int, link_tokens_per_s: float) -> None:
        self.policy, self.device = policy, device
        bytes_per_s = link_tokens_per_s * SHAPES["tiny"].kv_bytes_per_token
        self.hardware: HardwareProfile = dataclasses.replace(
            PROFILES["cpu"], link_bytes_per_s=bytes_per_s
        )
        self.link = link_tokens_per_s
        self.now_s = 0.0
        self.running: list[One] = []
        self.most = 0
        self.tokens = 0
        self.overflow = 0
        """Steps in which more was on the device than it holds."""
        self.cramped = 0
        """Prompts for which there was no room when they were computed: those that pause for them
        leave the device with the step after."""
        self.recomputed = 0
        self.unjust = 0
        """Decisions by which somebody pauses, not being fetched, while less urgent ones run."""

    def state(self, waiting: list[One]) -> SystemState:
        run = self.running
        gaps = [np.nan if len(r.done) < 2 else (r.last_s - r.first_s) / (len(r.done) - 1)
                for r in run]  # fmt: skip
        return make_state(
            requests(
                [r.tokens for r in run],
                request_id=[r.number for r in run],
                prompt_tokens=[r.prompt for r in run],
                uncached_tokens=[r.missing for r in run],
                waited_s=[self.now_s - r.last_s for r in run],
                max_new_tokens=4096,
                tpot_s=gaps,
                priority=[r.priority for r in run],
            ),
            requests(
                [r.prompt for r in waiting],
                request_id=[r.number for r in waiting],
                arrival_s=[r.at_s for r in waiting],
                priority=[r.priority for r in waiting],
            ),
            device_tokens=self.device,
            device_free_tokens=max(self.device - self._resident(), 0),
            host_tokens=10**6,
            hardware=self.hardware,
            model=SHAPES["tiny"],
            latency=Linear(),
            tpot_slo_s=SLO_S,
            now_s=self.now_s,
        )

    def _resident(self) -> int:
        return sum((r.tokens // BLOCK + 1) * BLOCK - r.missing for r in self.running)

    def iterate(self, waiting: list[One]) -> None:
        state = self.state(waiting)
        batch = self.policy.batch(state)
        check_batch(state, batch)
        ratios = self.policy.ratio(state, batch)
        check_ratios(state, batch, ratios)
        targets = planned_tokens(state.running, ratios.running, BLOCK)
        runs = np.delete(state.running.priority, batch.pause)
        kept_out = [i for i in batch.pause if targets[i] > 0]
        self.unjust += bool((state.running.priority[kept_out, None] > runs).any())
        if batch.admit:
            self._prefill([waiting[w] for w in batch.admit], waiting)
        else:
            self._decode(set(batch.pause), targets.tolist())

    def _prefill(self, admitted: list[One], waiting: list[One]) -> None:
        rows = sum(r.prompt for r in admitted)
        self.now_s += float(Linear().step_seconds(StepWork(0, 0, prefill_rows=rows)))
        room = sum((r.prompt // BLOCK + 1) * BLOCK for r in admitted)
        self.cramped += self._resident() + room > self.device
        for one in admitted:
            waiting.remove(one)
            one.tokens, one.first_s, one.last_s = one.prompt, self.now_s, self.now_s
            one.done.append(self.now_s)
            self.running.append(one)
        self.most = max(self.most, len(self.running))

    def _decode(self, pause: set[int], targets: list[int]) -> None:
        active = [r for i, r in enumerate(self.running) if i not in pause]
        for i in pause:
            one = self.running[i]
            if targets[i] > one.missing:
                one.missing = targets[i]
            elif targets[i] < one.missing:
                fetched = int(self.link * LINK_SHARE * STEP_S) // BLOCK * BLOCK
                one.missing = max(one.missing - fetched, 0)
        restored = sum(one.missing for one in active)
        self.recomputed += restored
        self.now_s += float(Linear().step_seconds(StepWork(len(active), 0, restored)))
        for one in active:
            one.missing = 0
            one.tokens += 1
            one.done.append(self.now_s)
            one.last_s = self.now_s
            self.tokens += 1
        self.overflow += self._resident() > self.device
        self.running = [r for r in self.running if len(r.done) < r.output]

    def serve(self, load: list[One]) -> None:
        coming, waiting = sorted(load, key=lambda r: r.at_s), []
        for _ in range(60_000):
            while coming and coming[0].at_s <= self.now_s:
                waiting.append(coming.pop(0))
            if not self.running and not waiting:
                if not coming:
                    return
                self.now_s = coming[0].at_s
                continue
            self.iterate(waiting)
        raise AssertionError("the load does not end")


def load(count: int, seed: int, every_s: float) -> list[One]:
    rng = np.random.default_rng(seed)
    return [
        One(i, int(rng.integers(60, 260)), int(rng.integers(20, 400)), i * every_s)
        for i in range(count)
    ]


def serve(rotate: bool, seed: int, device: int = 3200, link: float = 1e6) -> tuple[Loop, list[One]]:
    requests_ = load(40, seed, every_s=0.05)
    loop = Loop(Fcfs(rotate=rotate), device, link)
    loop.serve(requests_)
    return loop, requests_


def tpots(load: list[One]) -> FloatArray:
    return np.array([(r.last_s - r.first_s) / (len(r.done) - 1) for r in load])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("link", [1e6, 40_000.0])
def test_more_run_and_start_earlier_within_the_slo(seed: int, link: float) -> None:
    plain, before = serve(False, seed)
    rotating, after = serve(True, seed, link=link)
    assert rotating.most > plain.most
    wait = [np.mean([r.first_s - r.at_s for r in x]) for x in (before, after)]
    assert wait[1] < wait[0]
    assert tpots(after).max() <= SLO_S
    assert rotating.now_s <= 1.03 * plain.now_s  # to serve the same tokens
    assert (rotating.overflow, rotating.cramped) == (0, 0)
    assert rotating.recomputed == 0, "somebody resumed before its KV was back"


def test_slo_priority_rotates_as_fcfs_does_where_all_are_alike() -> None:
    served = []
    for policy in (Fcfs(), SloPriority()):
        loop, those = Loop(policy, 3200, 1e6), load(30, 0, every_s=0.05)
        loop.serve(those)
        served.append([r.done for r in those])
    assert served[0] == served[1]


def test_the_urgent_come_first_and_pause_for_nobody_less_urgent() -> None:
    waits = []
    for policy in (Fcfs(), SloPriority()):
        loop, those = Loop(policy, 3200, 1e6), load(40, 1, every_s=0.05)
        for one in those[::5]:
            one.priority = 1
        loop.serve(those)
        waits.append(max(r.first_s - r.at_s for r in those[::5]))
        assert tpots(those[::5]).max() <= SLO_S
    assert loop.most > 14  # it rotates: memory holds about so many
    assert loop.unjust == 0
    assert waits[1] < waits[0]


def test_a_stream_of_urgent_requests_does_not_starve_those_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More urgent requests than can be served: the others wait for a second, not for the last."""
    monkeypatch.setattr(levels, "AGE_S", 1.0)
    few = [One(i, 200, 300, 0.0) for i in range(3)]
    stream = [One(3 + i, 200, 100, 0.3 + 0.09 * i, priority=1) for i in range(130)]
    Loop(SloPriority(), 3200, 1e6).serve(few + stream)
    for one in few:
        behind_s = np.array(one.done) - one.first_s - SLO_S * np.arange(len(one.done))
        assert behind_s.max() <= levels.AGE_S + 0.5  # and until its KV has been fetched
    assert tpots(stream).max() <= SLO_S


def test_no_host_tier_or_no_slo_is_no_rotation() -> None:
    running = requests([100, 200])
    for host, slo in ((0, SLO_S), (999, np.inf)):
        state = make_state(running, device_tokens=320, host_tokens=host, tpot_slo_s=slo)
        assert not can_rotate(state)
        assert Fcfs().batch(state) == Fcfs(rotate=False).batch(state)


def test_nobody_is_admitted_to_room_that_those_who_pause_have_yet_to_leave() -> None:
    """SGLang computes the prompt first, and nobody makes way for it then."""
    policy, tokens = Fcfs(), np.full(9, 174)  # eight further ones do not fit in eleven blocks
    given: dict[str, Any] = {"tpot_s": 0.01, "waited_s": 0.0, "prompt_tokens": [20] * 9}
    running = requests(tokens, **given)
    waits = requests([16], request_id=[99], arrival_s=[999.0])
    full = make_state(running, waits, device_tokens=9 * 176, device_free_tokens=0,
                      host_tokens=10**6, tpot_slo_s=SLO_S, latency=Linear(), model=SHAPES["tiny"],
                      hardware=PROFILES["cpu"])  # fmt: skip
    batch = policy.batch(full)
    assert batch.pause and not batch.admit
    uncached = np.where(np.isin(np.arange(9), batch.pause), 160, 0)
    left = dataclasses.replace(
        full,
        running=requests(tokens, uncached_tokens=uncached, **given),
        memory=dataclasses.replace(full.memory, device_free_tokens=int(uncached.sum())),
    )
    assert policy.batch(left).admit == (0,)


@pytest.mark.parametrize(("host", "most"), [(10**6, 27), (1200, 12), (320, 9)])
def test_no_more_run_than_both_tiers_have_room_for(host: int, most: int) -> None:
    """Where memory holds nine, and each keeps a block; who is nowhere would be computed again. Half
    of the host is for what active ones lack."""
    running = requests([160] * 9, tpot_s=0.01, waited_s=0.0)
    state = make_state(running, requests([160] * 5), device_tokens=9 * 176, host_tokens=host,
                       tpot_slo_s=SLO_S, latency=Linear(), model=SHAPES["tiny"])  # fmt: skip
    assert _worth_it(state, 5) == most


def test_all_who_wait_are_a_queue_whoever_may_be_admitted_now() -> None:
    """Levels let five of a hundred be admitted; where all hundred cannot run, steps stay large."""
    running = requests([160] * 9, tpot_s=0.01, waited_s=0.0, priority=[0, 1] * 4 + [0])
    waits = requests([160] * 100, priority=1, request_id=np.arange(9, 109))
    state = make_state(running, waits, device_tokens=9 * 176, device_free_tokens=144,
                       host_tokens=10**6, tpot_slo_s=SLO_S, latency=Linear(),
                       model=SHAPES["tiny"], max_running=64)  # fmt: skip
    policy = SloPriority()
    policy.batch(state)
    assert policy._rotation._turns is not None
    assert policy._rotation._turns.answer <= _worth_it(state, 100) == 10 < _worth_it(state, 5)


def deadlines(slack: list[float], fetch: list[float]) -> Deadlines:
    return Deadlines(np.array(slack), np.array(fetch), step_s=0.01)


def test_they_resume_one_after_the_other() -> None:
    paused = np.ones(3, bool)
    # In the order of their deadlines they are there after 40 ms for the steps before, and 30,
    # 40 (a step at least), 140 ms.
    assert deadlines([0.5, 0.1, 0.1], [0.1, 0.03, 0.001]).spare_s(paused) == pytest.approx(0.02)
    assert deadlines([0.15, 0.1, 0.1], [0.1, 0.03, 0.001]).spare_s(paused) == pytest.approx(-0.03)
    assert deadlines([0.1], [0.1]).spare_s(np.zeros(1, bool)) == np.inf


def test_slack_is_what_a_reader_at_the_slos_pace_has_in_store() -> None:
    running = requests(
        [110, 101], prompt_tokens=[100, 100], tpot_s=[0.02, np.nan], waited_s=[0.05, 0.03]
    )
    state = make_state(running, device_tokens=999, host_tokens=99, tpot_slo_s=0.1)
    found = Deadlines.of(state, np.ones(2, bool)).slack_s
    assert found == pytest.approx([SLO_SHARE * 0.1 * 11 - 10 * 0.02 - 0.05, SLO_SHARE * 0.2 - 0.03])
