"""What eLLM adds to `/metrics`: figures, names that Prometheus likes, and a dashboard of them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ellm_sgl.engine.attainment import MOST_CLASSES, OTHER, TPOT, Attainment
from ellm_sgl.engine.request_table import Arrival
from ellm_sgl.latency import StepWork
from ellm_sgl.policies import FixedRatio, Stock
from ellm_sgl.sglang import families
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.metrics import UPDATE_S, Metrics, metrics_of
from ellm_sgl.sglang.scheduler import resize, scheduler_of
from tests.sglang.test_state import Server

DASHBOARD = Path(families.__file__).with_name("dashboard.json")
PREFILL = StepWork(decode_rows=0, decode_tokens=0, prefill_rows=9, prefill_pairs=45.0)
LABELS = {"model_name": "demo", "tp_rank": "0"}


class Told:
    """A server without SGLang, and what it tells Prometheus."""

    def __init__(self) -> None:
        self.server = Server()
        self.iteration = self.server.iteration
        self.elastic = self.iteration.elastic
        self.registry = CollectorRegistry()
        self.ours: Context = self.server.scheduler.token_to_kv_pool_allocator.ellm
        self.metrics = Metrics(self.ours, LABELS, self.registry)
        self.now_s = 0.0

    def update(self, after_s: float = UPDATE_S, idle: bool = False) -> None:
        self.now_s += after_s
        self.metrics.update(running=3, prefilling=1, waiting=2, now_s=self.now_s, idle=idle)

    def value(self, sample: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(sample, LABELS | labels)


@pytest.fixture
def told() -> Told:
    return Told()


def test_gauges_say_what_is_and_counters_what_has_been(told: Told) -> None:
    told.update()
    assert told.value("ellm_requests", state="waiting") == 2
    assert told.value("ellm_requests", state="prefilling") == 1
    assert told.value("ellm_cached_ratio") == 1
    assert told.value("ellm_evicted_units_total") == 0
    told.elastic.totals.evicted_units += 7
    told.elastic.totals.fetched_units += 5
    told.elastic.totals.fetched_ahead_units += 2
    told.update()
    told.elastic.totals.evicted_units += 1
    told.update()
    assert told.value("ellm_evicted_units_total") == 8
    assert told.value("ellm_step_restored_units_total", kind="fetched") == 3
    assert told.value("ellm_step_restored_units_total", kind="fetched_ahead") == 2
    assert told.value("ellm_fetched_bytes_total") == 5 * told.ours.pool.unit_bytes


def test_labels_of_sglang_that_ours_have_are_left_out(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    labels = {"model_name": "demo", "tp_rank": 0, "priority": "1", "owner": "us", "kind": "x"}
    scheduler = told.server.scheduler
    scheduler.metrics_collector_context = SimpleNamespace(
        collector=SimpleNamespace(labels=labels), current_scheduler_metrics_enabled=True
    )
    made = metrics_of(scheduler, CollectorRegistry())
    assert made is not None
    made.update(running=0, prefilling=0, waiting=0, now_s=1.0)
    assert "labels kind, owner: eLLM's metrics have their own" in caplog.text


@pytest.mark.parametrize("lower_first", [False, True])
def test_classes_have_the_priorities_that_clients_give(told: Told, lower_first: bool) -> None:
    """However SGLang orders them: policies count the more urgent as larger."""
    scheduler = told.server.scheduler
    scheduler.metrics_collector_context = SimpleNamespace(
        collector=SimpleNamespace(labels=LABELS), current_scheduler_metrics_enabled=True
    )
    scheduler.schedule_low_priority_values_first = lower_first
    urgency = scheduler_of(scheduler).turned(5)
    told.iteration.attainment.ended(urgency, TPOT, limit_s=1.0, measured_s=0.5)
    for other in range(1, MOST_CLASSES + 2):
        told.iteration.attainment.ended(100 + other, TPOT, 1.0, 0.5)
    registry = CollectorRegistry()
    made = metrics_of(scheduler, registry)
    assert made is not None
    made.update(running=0, prefilling=0, waiting=0, now_s=1.0)

    def count(priority: str) -> float | None:
        of = {"priority": priority, "objective": TPOT, "result": "met"}
        return registry.get_sample_value("ellm_slo_requests_total", LABELS | of)

    assert count("5") == 1 and count("-5") is None and count(OTHER) == 2


def test_metrics_that_cannot_be_told_stop_nobody(
    told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(told.metrics, "_observe", fails)
    for _ in range(3):
        told.update()
    assert len([line for line in caplog.messages if "no metrics from now on" in line]) == 1


def test_while_generation_is_paused_metrics_go_on(told: Told) -> None:
    """Nothing is decided then, but memory may be given back."""
    scheduler = told.server.scheduler
    ours = scheduler_of(scheduler)
    ours.metrics = told.metrics
    now = [0.0]
    told.iteration.clock = lambda: now[0]
    for paused in (False, True):
        scheduler._engine_paused = paused
        now[0] += 2 * UPDATE_S
        told.elastic.totals.pauses += 1
        resize(scheduler)
        assert told.value("ellm_pauses_total") == (2 if paused else None)


def test_nothing_is_told_before_it_is_due(told: Told) -> None:
    told.update()
    told.elastic.totals.pauses += 1
    told.update(after_s=UPDATE_S / 2)
    assert told.value("ellm_pauses_total") == 0
    told.update(after_s=UPDATE_S / 2)
    assert told.value("ellm_pauses_total") == 1


def test_the_last_steps_before_a_rest_are_told_of_at_once(told: Told) -> None:
    told.update()
    log = told.iteration.controller.steps
    log.start(StepWork(decode_rows=1, decode_tokens=10))
    log.idle()
    told.update(after_s=0.0, idle=True)
    assert told.value("ellm_step_seconds_count", phase="decode") == 1
    told.elastic.totals.pauses += 1
    told.update(after_s=0.0, idle=True)
    assert told.value("ellm_pauses_total") == 0, "an idle loop that spins costs nothing"


def test_every_step_and_decision_is_counted_once(told: Told) -> None:
    loop = told.iteration.controller
    for decode in (True, True, False, True):
        work = StepWork(decode_rows=1, decode_tokens=10) if decode else PREFILL
        loop.steps.start(work)
        told.update()
    loop.steps.idle()
    told.update()
    told.update()
    assert told.value("ellm_step_seconds_count", phase="decode") == 3
    assert told.value("ellm_step_predicted_seconds_count", phase="prefill") == 1
    loop.decision_s.extend([0.0003, 0.004])
    loop.decisions += 2
    told.update()
    assert told.value("ellm_decision_seconds_count") == 2
    assert told.value("ellm_decision_seconds_bucket", le="0.0005") == 1


def test_another_policy_takes_no_count_back(told: Told) -> None:
    loop = told.iteration.controller
    loop.guard.failures["late"] += 2
    told.ours.policy_name = "fcfs"
    told.update()
    assert told.value("ellm_policy_info", policy="fcfs") == 1
    loop.guard.failures["late"] += 1  # not told of yet
    loop.switch(FixedRatio(0.5))
    told.ours.policy_name = "fixed-ratio"
    loop.guard.failures["nan"] += 1
    told.update()
    assert told.value("ellm_policy_fallbacks_total", kind="late") == 3
    assert told.value("ellm_policy_fallbacks_total", kind="nan") == 1
    assert told.value("ellm_policy_info", policy="fcfs") == 0
    assert told.value("ellm_policy_info", policy="fixed-ratio") == 1
    loop.switch(Stock())
    told.update()
    assert told.value("ellm_policy_fallbacks_total", kind="late") == 3


def test_slos_are_counted_by_class(told: Told) -> None:
    arrival = Arrival(10, 10, 64, 0.0, 5, tpot_slo_s=1e9, ttft_slo_s=1e-9)
    requests = told.iteration.requests
    for aborted in (False, True):
        entry = requests.add(arrival, 0.0)
        told.iteration.ended(entry, 1, aborted)
    told.update()
    count = "ellm_slo_requests_total"
    assert told.value(count, priority="5", objective="ttft", result="missed") == 1
    assert told.value(count, priority="5", objective="tpot", result="met") is None, (
        "one token has no time per token"
    )
    assert told.value(count, priority="0", objective="tpot", result="met") == 0


def test_classes_of_priority_are_bounded() -> None:
    attained = Attainment()
    for priority in range(100):
        attained.ended(priority, TPOT, limit_s=1.0, measured_s=0.5)
    classes = {outcome.priority: count for outcome, count in attained.counts.items()}
    assert len(classes) == MOST_CLASSES + 1 and classes[OTHER] == 100 - MOST_CLASSES
    attained.ended(0, TPOT, limit_s=math.inf, measured_s=0.5)
    attained.ended(0, TPOT, limit_s=1.0, measured_s=math.nan)
    assert attained.counts.total() == 100


def test_the_time_to_the_first_token_is_that_of_the_first_look(told: Told) -> None:
    """What the server sees: a request that runs has its first token."""
    requests, now = told.iteration.requests, told.iteration.clock()
    slow = Arrival(10, 10, 64, now - 5.0, 0, tpot_slo_s=math.inf, ttft_slo_s=4.0)
    late = requests.add(slow, now - 5.0)
    fast = requests.add(dataclasses.replace(slow, arrival_s=now - 1.0), now - 1.0)
    for entry in (late, fast):
        told.iteration.ended(entry, 3, aborted=False)
    told.update()
    for result in ("met", "missed"):
        labels = {"priority": "0", "objective": "ttft", "result": result}
        assert told.value("ellm_slo_requests_total", **labels) == 1


def test_promtool_has_nothing_to_say(told: Told) -> None:
    told.update()
    assert promtool_says(generate_latest(told.registry)) == ""


def promtool_says(metrics: bytes) -> str:
    """Of names, types and labels; or why it cannot read them."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool: apt-get install prometheus")
    check = [promtool, "check", "metrics"]
    done = subprocess.run(check, input=metrics, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert (done.returncode == 0) == (said == ""), f"{done.returncode}: {said}"
    return said


def names() -> set[str]:
    """Every metric that eLLM has, as Prometheus stores it."""
    plain = {family.name for family in (*families.GAUGES, *families.COUNTERS)}
    kinds = [v for v in vars(families).values() if isinstance(v, families.Distribution)]
    return plain | {f"{f.name}_{end}" for f in kinds for end in ("sum", "count", "bucket")}


def queries() -> Iterator[str]:
    """Of all panels of the dashboard."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    used = {name for query in queries() for name in re.findall(r"\b(?:ellm|sglang)\w+", query)}
    assert used <= names()
    unseen = {re.sub(r"_(sum|count|bucket)$", "", name) for name in names() - used}
    seen = {re.sub(r"_(sum|count|bucket)$", "", name) for name in used}
    assert unseen <= seen, "a metric that no panel shows"
