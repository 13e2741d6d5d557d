"""The step log: from start to start, without the time in which nothing ran."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.engine import StepLog
from ellm_sgl.engine.pace import WINDOW_STEPS
from ellm_sgl.latency import FetchingLatencyModel, HostCopies, LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray

WORK = StepWork(decode_rows=2, decode_tokens=20)


class Recording(LatencyModel):
    """Predicts what it saw last."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepWork, float]] = []

    def step_seconds(self, work: StepWork) -> FloatArray:
        return np.asarray(self.seen[-1][1] if self.seen else 0.0)

    def observe(self, work: StepWork, seconds: float) -> None:
        self.seen.append((work, seconds))


def log_at(*times: float) -> StepLog:
    moments = iter(times)
    return StepLog(Recording(), clock=lambda: next(moments))


def test_a_step_lasts_until_the_next_begins() -> None:
    log = log_at(1.0, 1.5, 3.5)
    for _ in range(3):
        log.start(WORK)
    assert [r.seconds for r in log.reports] == [0.5, 2.0]
    assert log.steps == 2 and log.last is log.reports[-1]


def test_the_prediction_is_from_before_the_step_was_seen() -> None:
    log = log_at(1.0, 1.5, 3.5, 4.0)
    for _ in range(4):
        log.start(WORK)
    assert [r.predicted_s for r in log.reports] == [0.0, 0.5, 2.0]


def test_idle_time_belongs_to_no_step() -> None:
    log = log_at(1.0, 1.5, 50.0, 50.25)
    log.start(WORK)
    log.idle()
    log.start(WORK)
    log.idle()
    assert [r.seconds for r in log.reports] == [0.5, 0.25]


def test_turning_to_prompts_and_back_is_noted_also_across_a_pause() -> None:
    prompt = StepWork(decode_rows=0, decode_tokens=0, prefill_rows=5, prefill_pairs=15)
    log = log_at(*map(float, range(20)))
    for work in (prompt, prompt, WORK, WORK, prompt):
        log.start(work)
    log.idle()
    log.start(prompt)
    log.start(WORK)
    log.idle()
    assert [r.work.phase_changes for r in log.reports] == [0, 0, 1, 0, 1, 0, 1]


def test_stalls_belong_to_the_step_under_way() -> None:
    log = log_at(1.0, 2.0, 3.0)
    log.start(WORK)
    log.stalled(0.25)
    log.stalled(0.25)
    log.start(WORK)
    log.start(WORK)
    assert [r.swap_stall_s for r in log.reports] == [0.5, 0.0]


def test_nothing_is_reported_before_the_first_step_ends() -> None:
    log = log_at(1.0)
    assert log.last is None
    log.start(WORK)
    assert log.last is None


def test_waiting_for_the_link_teaches_the_model_nothing() -> None:
    log = log_at(1.0, 2.0, 3.0)
    log.start(WORK)
    log.stalled(0.25)
    log.start(WORK)
    log.start(WORK)
    assert isinstance(log.model, Recording)
    assert [seconds for _, seconds in log.model.seen] == [0.75, 1.0]
    assert [r.seconds for r in log.reports] == [1.0, 1.0]


def test_the_last_step_that_decoded_is_known_behind_a_prompt() -> None:
    log = log_at(1.0, 2.0, 5.0, 6.0)
    mixed = StepWork(decode_rows=2, decode_tokens=20, prefill_rows=5, prefill_pairs=15)
    for work in (WORK, StepWork(0, 0, prefill_rows=5, prefill_pairs=15), mixed):
        log.start(work)
    log.idle()
    assert log.last is log.reports[-1] and log.last_decode is log.reports[0]


def test_time_that_counts_is_that_of_steps_and_of_the_one_in_flight() -> None:
    log = log_at(1.0, 1.5, 3.5, 4.0, 50.0, 51.0, 60.0)
    assert log.busy_s == 0.0
    log.start(WORK)  # at 1.0
    assert log.busy_s == 0.5  # at 1.5
    log.start(WORK)  # at 3.5
    log.idle()  # at 4.0
    assert log.busy_s == log.busy_s == 3.0  # nothing is in flight: nobody looks at the clock
    log.start(WORK)  # at 50.0
    assert log.busy_s == 4.0  # at 51.0
    assert log.busy_s == 13.0  # at 60.0


def test_what_happened_of_late_ends_where_nothing_ran() -> None:
    times = [0.0, 0.5, 1.0, 1.25, 90.0, 90.5, 92.5, 95.0, 95.5, 97.0]
    log = log_at(*times)
    for _ in range(3):
        log.start(WORK)
    log.idle()  # at 1.25
    log.start(WORK)  # at 90.0: in flight
    assert [r.ended_s for r in log.recent(1.0)] == [1.25], "the last one in any case"
    log.start(WORK)  # at 90.5
    assert [r.ended_s for r in log.recent(1.0)] == [90.5]
    log.start(WORK)  # at 92.5
    assert [r.seconds for r in log.recent(1.0)] == [2.0]
    log.idle()  # at 95.0
    assert [r.ended_s for r in log.recent(1.0)] == [95.0]  # at 95.5
    assert log.recent(1.0) == []  # at 97.0


class Fetching(LatencyModel):
    """A step takes 10 ms, and what it computes again 1 ms a token; learns nothing."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        share = work.recompute_share if work.swap_tokens else 1.0
        return np.asarray(0.010 + 0.001 * share * work.restored_tokens, np.float64)

    def observe(self, work: StepWork, seconds: float) -> None: ...


COPIES = {
    "none shown": None,
    "room for all": HostCopies(uncached=0, held=0, capacity=10),
    "full": HostCopies(uncached=10, held=9, capacity=9),
    "nothing is there": HostCopies(uncached=10, held=0, capacity=0),
}


@pytest.mark.parametrize(
    ("shown", "pace"),
    [("none shown", 1.0), ("room for all", 1.1), ("full", 1.0), ("nothing is there", 1.0)],
)
def test_pace_counts_what_had_to_be_computed_again(shown: str, pace: float) -> None:
    """Policies expect to fetch what the host had when they were asked, and what it had room for.
    What others took of that, they did not foresee; what was lost then, they did."""
    now = [0.0]
    log = StepLog(Fetching(), lambda: now[0])
    if (copies := COPIES[shown]) is not None:
        log.shown = FetchingLatencyModel(log.model, copies)
    work = StepWork(2, 20, restored_tokens=10, swap_tokens=10, recompute_share=0.1)
    for _ in range(3 * WINDOW_STEPS):
        log.start(work)
        now[0] += float(log.model.step_seconds(work))
    log.idle()
    assert log.pace.ratio == pytest.approx(pace)
    assert [r.predicted_s for r in log.reports] == pytest.approx([r.seconds for r in log.reports])


def test_what_is_restored_without_a_host_was_foreseen() -> None:
    now = [0.0]
    log = StepLog(Fetching(), lambda: now[0])
    for _ in range(3 * WINDOW_STEPS):
        log.start(StepWork(2, 20, restored_tokens=10))
        now[0] += 0.020
    log.idle()
    assert log.pace.ratio == pytest.approx(1.0)
