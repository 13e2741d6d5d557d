"""The metrics that eLLM has: names, meanings, and where the loop keeps each figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ellm_sgl.config import DEVICE
from ellm_sgl.engine import Iteration
from ellm_sgl.engine.attainment import OTHER, TPOT, TTFT, Outcome
from ellm_sgl.memory.shape import PoolStatistics
from ellm_sgl.memory.totals import Totals
from ellm_sgl.sglang.context import Context

Labels = tuple[str, ...]
"""Values of a family's own labels, in its order."""
Values = Mapping[Labels, float]


@dataclass(frozen=True)
class Scene:
    """What all figures of one update are read from."""

    ours: Context
    iteration: Iteration
    statistics: PoolStatistics
    running: int
    """Requests; those that pause included."""
    prefilling: int
    """Whose prompts are computed in chunks."""
    waiting: int
    lower_first: bool = False
    """Clients give the more urgent requests the smaller numbers."""

    @property
    def totals(self) -> Totals:
        return self.ours.elastic.totals


@dataclass(frozen=True)
class Family:
    """A gauge, or a counter, for each combination of its labels."""

    name: str
    text: str
    values: Callable[[Scene], Values]
    labels: Labels = ()


@dataclass(frozen=True)
class Distribution:
    """A histogram."""

    name: str
    text: str
    buckets: tuple[float, ...]
    labels: Labels = ()


def _one(of: Callable[[Scene], float]) -> Callable[[Scene], Values]:
    return lambda scene: {(): of(scene)}


def _requests(scene: Scene) -> Values:
    paused = min(len(scene.iteration.in_force.pause), scene.running)
    counts = {
        "decoding": scene.running - paused,
        "paused": paused,
        "prefilling": scene.prefilling,
        "waiting": scene.waiting,
    }
    return {(state,): count for state, count in counts.items()}


def _units(scene: Scene) -> Values:
    found = scene.statistics
    counts = {
        "device": scene.ours.table.used_units,
        "device_free": found.units_free,
        "missing": found.missing_units,
        "host": found.host_units_total - found.host_units_free,
        "host_free": found.host_units_free,
    }
    return {(placement,): count for placement, count in counts.items()}


def _bytes(scene: Scene) -> Values:
    owners = dataclasses.asdict(scene.ours.memory.describe())
    return {(owner,): nbytes for owner, nbytes in owners.items() if nbytes is not None}


def _target_ratio(scene: Scene) -> float:
    ratios = scene.iteration.in_force.uncached_ratios.values()
    return sum(ratios) / len(ratios) if ratios else 0.0


def _split(scene: Scene) -> Values:
    split = scene.iteration.in_force.split
    return {("fetched",): split.swap_layers, ("recomputed",): split.recompute_layers}


def _restored(scene: Scene) -> Values:
    totals = scene.totals
    beside = totals.fetched_ahead_units + totals.projected_units
    return {
        ("recomputed",): totals.recomputed_units,
        ("fetched",): totals.fetched_units - beside,
        ("fetched_ahead",): totals.fetched_ahead_units,
        ("projected",): totals.projected_units,
    }


def _fetched_bytes(scene: Scene) -> float:
    ours, totals, hidden = scene.ours, scene.totals, scene.ours.executor.hidden
    nbytes = (totals.fetched_units - totals.projected_units) * ours.pool.unit_bytes
    if hidden is not None and ours.settings.hidden_on != DEVICE:
        nbytes += totals.projected_units * hidden.unit_bytes
    return nbytes


FALLBACKS = ("late", "exception", "type", "shape", "nan", "range", "duplicate", "stall")
"""Kinds that are there from the start, at 0: an alarm needs something to grow from."""


def _fallbacks(scene: Scene) -> Values:
    counts = dict.fromkeys(FALLBACKS, 0) | scene.iteration.controller.fallbacks
    return {(kind,): count for kind, count in counts.items()}


def _attained(scene: Scene) -> Values:
    counts = scene.iteration.attainment.counts
    ordinary = [Outcome("0", objective, met) for objective in (TPOT, TTFT) for met in (True, False)]
    every = {outcome: counts[outcome] for outcome in (*ordinary, *counts)}
    return {
        (
            _as_given(which.priority, scene.lower_first),
            which.objective,
            "met" if which.met else "missed",
        ): count
        for which, count in every.items()
    }


def _as_given(priority: str, lower_first: bool) -> str:
    """A class's label, with the sign that its requests came with."""
    return str(-int(priority)) if lower_first and priority != OTHER else priority


GAUGES = (
    Family("ellm_requests", "Requests by what they do", _requests, ("state",)),
    Family("ellm_cached_ratio", "Mean share of each request's KV that is on the device",
           _one(lambda s: s.statistics.cached_ratio_mean)),
    Family("ellm_uncached_target_ratio", "Mean uncached ratio r that the policy aims at",
           _one(_target_ratio)),
    Family("ellm_uncached_tokens", "Tokens of requests that lack some KV on the device",
           _one(lambda s: s.statistics.uncached_tokens)),
    Family("ellm_units", "Units of KV (a block of one layer group) by where they are", _units,
           ("placement",)),
    Family("ellm_memory_bytes", "Memory of one rank by owner; left: nobody's", _bytes, ("owner",)),
    Family("ellm_device_committed_bytes", "Memory that the device pool has of the machine",
           _one(lambda s: s.ours.pool.bytes_behind(s.statistics.units_committed))),
    Family("ellm_device_reserved_bytes", "Addresses that the device pool has",
           _one(lambda s: s.ours.pool.buffer.nbytes)),
    Family("ellm_work_split_layers", "l1 and l2: of l1 + l2 layers, how many are restored how",
           _split, ("restored",)),
    Family("ellm_delta_ratio", "Share of the processor given to recomputed rows",
           _one(lambda s: s.iteration.in_force.split.delta_share)),
    Family("ellm_pace_ratio", "Time of decode steps of late over what was predicted",
           _one(lambda s: s.iteration.controller.steps.pace.ratio)),
    Family("ellm_policy_info", "1 for the policy in force",
           lambda s: {(s.ours.policy_name,): 1}, ("policy",)),
)  # fmt: skip

COUNTERS = (
    Family("ellm_evicted_units_total", "Units of requests that left the device",
           _one(lambda s: s.totals.evicted_units)),
    Family("ellm_saved_units_total", "Units copied to the host",
           _one(lambda s: s.totals.saved_units)),
    Family("ellm_step_restored_units_total", "Missing units brought back for a step, by how",
           _restored, ("kind",)),
    Family("ellm_restored_units_total", "Units that came back to stay",
           _one(lambda s: s.totals.restored_units)),
    Family("ellm_recomputed_tokens_total", "Rows that steps computed again",
           _one(lambda s: s.totals.recomputed_tokens)),
    Family("ellm_fetched_bytes_total", "Fetched from the host", _one(_fetched_bytes)),
    Family("ellm_stall_seconds_total", "Time that layers waited for the host",
           _one(lambda s: s.totals.swap_stall_s)),
    Family("ellm_pauses_total", "Times that a running request was paused",
           _one(lambda s: s.totals.pauses)),
    Family("ellm_retractions_total", "Requests that SGLang sent back to the queue, or aborted",
           _one(lambda s: s.totals.retractions)),
    Family("ellm_page_table_seconds_total", "Time spent on bookkeeping",
           _one(lambda s: s.totals.page_table_s)),
    Family("ellm_policy_fallbacks_total", "Answers of the policy that were replaced", _fallbacks,
           ("kind",)),
    Family("ellm_slo_requests_total", "Requests that ended with an SLO, by class of priority",
           _attained, ("priority", "objective", "result")),
)  # fmt: skip

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_SECONDS = Distribution(
    "ellm_step_seconds", "Time of steps, from start to start", _STEP_BUCKETS, ("phase",)
)
STEP_PREDICTED_SECONDS = Distribution(
    "ellm_step_predicted_seconds", "Time that steps were predicted to take", _STEP_BUCKETS,
    ("phase",),
)  # fmt: skip
STEP_ERROR_RATIO = Distribution(
    "ellm_step_error_ratio", "How far predictions were off, as a share of the measured time",
    (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), ("phase",),
)  # fmt: skip
DECISION_SECONDS = Distribution(
    "ellm_decision_seconds", "Time of the policy's answers to one question",
    (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1),
)  # fmt: skip
