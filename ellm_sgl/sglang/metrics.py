"""eLLM's metrics in SGLang's own `/metrics` (`--enable-metrics`).

The scheduler process has the figures and the HTTP process answers; between them lie the files of
prometheus_client's multiprocess mode, as for SGLang's metrics, whose labels these have, too.
Twice a second at most they are brought up to date from what the loop counts anyway (`families`):
nothing is done per token, and nothing at all without `--enable-metrics`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.context import Context, context_of
from ellm_sgl.sglang.families import (
    COUNTERS,
    DECISION_SECONDS,
    GAUGES,
    STEP_ERROR_RATIO,
    STEP_PREDICTED_SECONDS,
    STEP_SECONDS,
    Distribution,
    Family,
    Labels,
    Scene,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

UPDATE_S = 0.5
"""So far apart, in seconds, updates are, at least."""

PHASES = ("decode", "prefill")
DISTRIBUTIONS = (STEP_SECONDS, STEP_PREDICTED_SECONDS, STEP_ERROR_RATIO, DECISION_SECONDS)


class Metrics:
    """The metrics of one scheduler process.

    Args:
        ours: of that process, with the loop.
        labels: that every metric has: SGLang's.
        registry: prometheus_client's own unless given.
        lower_first: as of `Scene`.
    """

    def __init__(
        self,
        ours: Context,
        labels: Mapping[str, str],
        registry: CollectorRegistry | None = None,
        lower_first: bool = False,
    ) -> None:
        # Not before: where metrics are kept is decided as prometheus_client is imported.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        self._ours = ours
        self._lower_first = lower_first
        self._labels = dict(labels)
        self._registry = registry or REGISTRY
        recent: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        self._gauges = [(f, self._declare(Gauge, f, **recent)) for f in GAUGES]
        self._counters = [(f, self._declare(Counter, f)) for f in COUNTERS]
        self._histograms = {
            f: self._declare(Histogram, f, buckets=f.buckets) for f in DISTRIBUTIONS
        }
        self._children: dict[tuple[str, Labels], Any] = {}
        self._told: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        """By the family's name."""
        self._steps = self._decisions = 0
        self._due_s = -math.inf
        self._failed = False
        for phase in PHASES:
            for distribution in (STEP_SECONDS, STEP_PREDICTED_SECONDS, STEP_ERROR_RATIO):
                self._child(distribution, self._histograms[distribution], (phase,))
        self._child(DECISION_SECONDS, self._histograms[DECISION_SECONDS], ())

    def update(
        self, running: int, prefilling: int, waiting: int, now_s: float, idle: bool = False
    ) -> None:
        """Once per turn of the loop; returns at once unless an update is due.

        Args:
            running, prefilling, waiting: requests.
            now_s: monotonic.
            idle: nothing runs from now on: the last steps are told of at once.
        """
        if self._failed:
            return
        try:
            self._update((running, prefilling, waiting), now_s, idle)
        except Exception:  # who is only watched goes on
            logger.exception("eLLM: no metrics from now on")
            self._failed = True

    def _update(self, counts: tuple[int, int, int], now_s: float, idle: bool) -> None:
        iteration = self._ours.iteration
        assert iteration is not None
        ended = idle and iteration.controller.steps.steps != self._steps
        if now_s < self._due_s and not ended:
            return
        self._due_s = now_s + UPDATE_S
        statistics = self._ours.table.statistics()
        scene = Scene(self._ours, iteration, statistics, *counts, self._lower_first)
        for family, metric in self._gauges:
            told, values = self._told[family.name], family.values(scene)
            gone = dict.fromkeys(told.keys() - values.keys(), 0.0)
            for labels, value in {**values, **gone}.items():
                if value != told.get(labels):
                    told[labels] = value
                    self._child(family, metric, labels).set(value)
        for family, metric in self._counters:
            told = self._told[family.name]
            for labels, value in family.values(scene).items():
                before = told.get(labels)
                if value != before:
                    told[labels] = value
                    self._child(family, metric, labels).inc(max(value - (before or 0.0), 0.0))
        self._observe(scene)

    def _observe(self, scene: Scene) -> None:
        """Steps and decisions since the last time, as many as are still known."""
        loop = scene.iteration.controller
        steps, self._steps = loop.steps.steps - self._steps, loop.steps.steps
        for step in _last(loop.steps.reports, steps):
            phase = ("prefill" if step.work.prefill_rows else "decode",)
            self._sample(STEP_SECONDS, step.seconds, phase)
            self._sample(STEP_PREDICTED_SECONDS, step.predicted_s, phase)
            if step.seconds > 0:
                error = abs(step.predicted_s - step.seconds) / step.seconds
                self._sample(STEP_ERROR_RATIO, error, phase)
        decisions, self._decisions = loop.decisions - self._decisions, loop.decisions
        for seconds in _last(loop.decision_s, decisions):
            self._sample(DECISION_SECONDS, seconds, ())

    def _sample(self, family: Distribution, value: float, labels: Labels) -> None:
        if math.isfinite(value):
            self._child(family, self._histograms[family], labels).observe(value)

    def _declare(self, kind: Any, family: Family | Distribution, **more: Any) -> Any:
        names = [*self._labels, *family.labels]
        return kind(family.name, family.text, names, registry=self._registry, **more)

    def _child(self, family: Family | Distribution, metric: Any, labels: Labels) -> Any:
        key = family.name, labels
        if key not in self._children:
            own = dict(zip(family.labels, labels, strict=True))
            self._children[key] = metric.labels(**self._labels, **own)
        return self._children[key]


def _last(values: Any, count: int) -> Any:
    return itertools.islice(values, max(len(values) - count, 0), None)


def metrics_of(scheduler: Scheduler, registry: CollectorRegistry | None = None) -> Metrics | None:
    """Those of this process, where SGLang's scheduler tells its own; else None.

    Args:
        registry: as of `Metrics`.
    """
    told = scheduler.metrics_collector_context
    if told.collector is None or not told.current_scheduler_metrics_enabled:
        return None
    given = {name: str(value) for name, value in told.collector.labels.items()}
    ours = {label for family in (*GAUGES, *COUNTERS, *DISTRIBUTIONS) for label in family.labels}
    # SGLang's class of priority is one that ours have a meaning of their own for.
    if taken := sorted(ours.intersection(given).difference({"priority"})):
        logger.warning("labels %s: eLLM's metrics have their own", ", ".join(taken))
    labels = {name: value for name, value in given.items() if name not in ours}
    lower_first = bool(scheduler.schedule_low_priority_values_first)
    return Metrics(context_of(scheduler), labels, registry, lower_first)
