"""Which requests pause, why, and for how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import SystemState
from ellm_sgl.policies.slo_priority.levels import rank_levels
from ellm_sgl.policies.slo_priority.schedule import (
    MAX_STEPS_PER_TOKEN,
    SLO_SHARE,
    Losses,
    Schedule,
    build,
)
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.slo_server import CpuServer

LOSS = 0.05


def state_of(urgent: int, others: int, uncached: list[int] | int = 0, slo: float = np.inf):
    count = urgent + others
    running = requests(
        np.full(count, 256),
        priority=np.arange(count) < urgent,
        uncached_tokens=uncached,
        tpot_slo_s=np.where(np.arange(count) < urgent, slo, np.inf),
    )
    return make_state(running, device_tokens=10**6, latency=CpuServer())


def built(
    state: SystemState, pressure: bool = True, allowed: float = LOSS, slo_loss: float = 0.0
) -> Schedule:
    level = rank_levels(state.running, state.waiting).running
    return build(state, level, pressure, allowed, slo_loss)


def step_s(state: SystemState, paused: tuple[int, ...]) -> float:
    runs = np.ones(len(state.running), bool)
    runs[list(paused)] = False
    uncached = state.running.uncached_tokens[runs].astype(float)
    tokens = state.running.tokens[runs].sum()
    work = StepWork(runs.sum(), tokens, uncached.sum(), (uncached * uncached).sum())
    return float(state.latency.step_seconds(work))


def test_nobody_pauses_among_equals() -> None:
    assert built(state_of(0, 24)).paused(state_of(0, 24)) == ()


def test_an_slo_that_no_step_keeps_takes_nothing_from_those_of_the_others() -> None:
    state = state_of(4, 20, slo=0.03)
    slos_s = state.running.tpot_slo_s.copy()
    slos_s[0] = 0.001
    mixed = replace(state, running=replace(state.running, tpot_slo_s=slos_s))
    for each in (state, mixed):
        paused = built(each, slo_loss=0.4).paused(each)
        assert 0.7 * 0.03 < step_s(each, paused) <= SLO_SHARE * 0.03
    slos_s[1] = 0.025  # and this one is kept
    assert step_s(mixed, built(mixed, slo_loss=0.4).paused(mixed)) <= SLO_SHARE * 0.025


def test_nobody_pauses_without_pressure_or_slo() -> None:
    state = state_of(4, 20)
    assert built(state, pressure=False).paused(state) == ()


def test_nobody_pauses_while_the_slo_is_met() -> None:
    state = state_of(4, 20, slo=0.1)
    assert built(state).paused(state) == ()


def test_an_empty_server() -> None:
    state = make_state(requests([]), device_tokens=64)
    assert built(state).paused(state) == ()


def test_as_few_as_meet_the_slo() -> None:
    state = state_of(4, 20, slo=0.04)
    paused = built(state, pressure=False, allowed=0.4).paused(state)
    assert paused
    assert step_s(state, paused) <= SLO_SHARE * 0.04
    assert step_s(state, paused[1:]) > SLO_SHARE * 0.04


@pytest.mark.parametrize("of_server", [False, True])
def test_steps_that_take_longer_than_predicted_leave_less_of_the_slo(of_server: bool) -> None:
    slo, slow = 0.07, 1.5
    state = state_of(4, 20, slo=np.inf if of_server else slo)
    state = replace(state, tpot_slo_s=slo if of_server else np.inf)
    assert slo / slow < step_s(state, ()) <= SLO_SHARE * slo
    assert not built(state, pressure=False, allowed=0.4).paused(state)
    state = replace(state, pace=slow)
    paused = built(state, pressure=False, allowed=0.4).paused(state)
    assert paused
    assert slow * step_s(state, paused) <= SLO_SHARE * slo
    assert slow * step_s(state, paused[1:]) > SLO_SHARE * slo


def test_no_more_is_lost_than_allowed() -> None:
    for allowed in (0.0, 0.02, 0.05, 0.2):
        state = state_of(4, 20, slo=0.001)
        schedule = built(state, allowed=allowed)
        running = 24 - len(schedule.paused(state))
        rate, full = running / step_s(state, schedule.paused(state)), 24 / step_s(state, ())
        assert 1 - rate / full <= allowed + 1e-6
        assert schedule.loss == pytest.approx(1 - rate / full, abs=1e-3)


def test_an_slo_that_can_be_kept_may_cost_more_and_one_that_cannot_may_not() -> None:
    kept, tight = state_of(4, 20, slo=0.04), state_of(4, 20, slo=0.001)
    schedule = built(kept, slo_loss=0.4)
    assert LOSS < schedule.loss <= 0.4
    assert step_s(kept, schedule.paused(kept)) <= SLO_SHARE * 0.04
    assert step_s(kept, built(kept).paused(kept)) > SLO_SHARE * 0.04
    assert built(tight, slo_loss=0.4).loss == built(tight).loss <= LOSS


def test_those_with_much_to_recompute_pause_first() -> None:
    state = state_of(4, 20, uncached=[0] * 22 + [160, 160], slo=0.0675)
    paused = built(state).paused(state)
    assert paused and set(paused) <= {22, 23}


def test_only_less_urgent_requests_pause() -> None:
    for seed in range(100):
        state = random_state(np.random.default_rng(seed), Size(64, 64, 4096))
        level = rank_levels(state.running, state.waiting).running
        schedule = built(state, allowed=0.2)
        assert schedule.loss <= 0.2 + 1e-9
        assert all(level[i] > level.min() for i in schedule.paused(state))


@pytest.mark.parametrize("others", [1, 2, 3, 7, 8, 9, 20, 33])
@pytest.mark.parametrize("lacking", [0, 1])
def test_everybody_runs_now_and_then(others: int, lacking: int) -> None:
    """As steps go by everybody pauses for some, and nobody more than the bound."""
    uncached = [0, *([160] * lacking), *([0] * (others - lacking))]
    state = state_of(1, others, uncached=uncached, slo=1e-6)
    schedule = built(state, allowed=0.9)
    last, gap, longest = np.zeros(others + 1), np.zeros(others + 1, int), 0
    now = 0.0
    for _ in range(60):
        waited = now - last
        running = replace(state.running, waited_s=waited)
        paused = schedule.paused(replace(state, running=running))
        runs = np.ones(others + 1, bool)
        runs[list(paused)] = False
        now += step_s(state, paused)
        last[runs] = now
        gap = np.where(runs, 0, gap + 1)
        longest = max(longest, int(gap.max()))
    assert 1 < longest < MAX_STEPS_PER_TOKEN


def test_the_servers_slo_is_everybodys() -> None:
    """Where a request brings none, and where it brings a looser one."""
    told = built(state_of(4, 20, slo=0.04), pressure=False, allowed=0.4)
    for own in (np.inf, 0.08):
        state = replace(state_of(4, 20, slo=own), tpot_slo_s=0.04)
        schedule = built(state, pressure=False, allowed=0.4)
        assert schedule.loss == told.loss > 0
        assert schedule.paused(state) == told.paused(state)


def test_nobody_pauses_for_a_servers_slo_that_a_full_step_keeps() -> None:
    """Whoever paused would miss it instead."""
    full = step_s(state_of(4, 20), ())
    for slo in (1.05 * full, 1.2 * full):
        state = replace(state_of(4, 20), tpot_slo_s=slo)
        assert built(state, pressure=False, allowed=0.4, slo_loss=0.4).paused(state) == ()


@pytest.mark.parametrize("share", [0.9, 1.05, 10.0])
def test_the_servers_slo_takes_nothing_from_what_pressure_asks_for(share: float) -> None:
    """A looser one changes nothing of it, and one that is missed asks for more at most."""
    state = state_of(4, 20)
    told = built(state, allowed=0.4)
    with_slo = replace(state, tpot_slo_s=share * step_s(state, ()))
    assert told.paused(state)
    paused = built(with_slo, allowed=0.4).paused(with_slo)
    assert set(paused) >= set(told.paused(state)) if share < 1 else paused == told.paused(state)


def test_what_was_not_lost_may_be_lost_later() -> None:
    losses = Losses(LOSS)
    assert losses.allowed == LOSS
    for second in range(60):
        losses.note(float(second), 0.0)
    saved_up = losses.allowed
    spent = []
    for second in range(60, 400):
        spent.append(losses.allowed)
        losses.note(float(second), losses.allowed)
    assert saved_up > 2 * LOSS
    assert spent[-1] == pytest.approx(LOSS, abs=1e-3)
    assert sum(spent) / 400 <= 1.05 * LOSS
