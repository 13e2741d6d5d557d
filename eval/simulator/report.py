"""Figures of a simulation, in the terms of a replay against a real server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ellm_sgl.client.summary import Spread, Summary, per_second
from ellm_sgl.client.traces import FloatArray
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.eval.simulator.engine import Simulation, Tick
from ellm_sgl.eval.simulator.load import Load, Progress
from ellm_sgl.eval.simulator.machines import Machine
from ellm_sgl.eval.simulator.record import Sample
from ellm_sgl.eval.simulator.settings import Settings

BoolArray = npt.NDArray[np.bool_]

SERIES_POINTS = 400
"""Points of a time series that are kept."""


@dataclass(frozen=True)
class ClassSummary:
    """Requests of one priority, among the others of their load."""

    priority: int
    requests: int
    ttft: Spread
    tpot: Spread
    slo_attainment: float
    """As in `Summary`, and"""
    tpot_attainment: float


@dataclass(frozen=True)
class SimReport:
    """One server, one load."""

    machine: str
    settings: Settings
    summary: Summary
    classes: tuple[ClassSummary, ...]
    """By priority, the most urgent first."""
    running_mean: float
    """Requests that decode together, averaged over decoding time;"""
    running_most: int
    """and at the most."""
    uncached_share: float
    """Restored tokens over all tokens that decode steps read."""
    retractions: int
    refused: int
    """Requests larger than the device, which whole-request servers cannot take."""
    decode_steps: int
    decode_step_s: float
    """Mean time of a decode step."""
    decode_tokens_per_s: float
    """Tokens of decode steps, per second of these."""
    fragmentation: float
    """Share of the token places in decoding requests' blocks that hold no token."""
    recomputed_prompt_share: float
    """Prompt tokens computed over prompt tokens asked, less 1: prefilled again."""
    fallbacks: dict[str, int]
    """Answers of the policy that had to be replaced, by kind."""
    wall_s: float
    """Time that simulating took."""
    series: tuple[Sample, ...]


def simulate(
    machine: Machine, settings: Settings, load: Load, tick: Tick | None = None
) -> SimReport:
    """Serve a load and sum it up. Deterministic but for `wall_s`."""
    simulation = Simulation(machine, settings, load)
    simulation.run(tick)
    return sum_up(simulation)


def sum_up(simulation: Simulation) -> SimReport:
    """The figures of a simulation that was run."""
    record, mode = simulation.record, simulation.mode
    failures = mode.iteration.controller.guard.failures if isinstance(mode, Elastic) else {}
    served = ~simulation.progress.refused
    prompts = float(simulation.load.prompt_tokens[served].sum())
    found = _Latencies.of(simulation.load, simulation.progress)
    return SimReport(
        machine=simulation.machine.name,
        settings=simulation.settings,
        summary=_summary(simulation, found),
        classes=_classes(simulation.load, found),
        running_mean=_over(record.rows_s, record.decode_s),
        running_most=record.running_most,
        uncached_share=_over(record.restored_tokens, record.decoded_tokens),
        retractions=record.retractions,
        refused=int(simulation.progress.refused.sum()),
        decode_steps=record.decode_steps,
        decode_step_s=_over(record.decode_s, record.decode_steps),
        decode_tokens_per_s=_over(record.rows, record.decode_s),
        fragmentation=1 - _over(record.held_tokens, record.held_places),
        recomputed_prompt_share=_over(record.prefill_rows, prompts) - 1,
        fallbacks=dict(failures),
        wall_s=record.wall_s,
        series=tuple(record.samples[:: max(len(record.samples) // SERIES_POINTS, 1)]),
    )


@dataclass(frozen=True, eq=False)
class _Latencies:
    """Of each request: seconds, nan where there is none; and whether it was within its SLOs."""

    ttft: FloatArray
    tpot: FloatArray
    in_tpot: BoolArray
    in_time: BoolArray
    """Within both."""

    @classmethod
    def of(cls, load: Load, progress: Progress) -> _Latencies:
        ttft = progress.first_s - load.at_s
        decoded, spent = progress.generated - 1, progress.last_s - progress.first_s
        tpot = np.where(decoded > 0, spent / np.maximum(decoded, 1), np.nan)
        in_tpot = ~progress.refused & ~(tpot > load.tpot_slo_s)
        return cls(ttft, tpot, in_tpot, in_tpot & ~(ttft > load.ttft_slo_s))


def _summary(simulation: Simulation, found: _Latencies) -> Summary:
    load, progress, record = simulation.load, simulation.progress, simulation.record
    began = float(load.at_s.min(initial=0.0))
    seconds = float(np.nanmax(progress.last_s, initial=began)) - began
    drain = float(np.nanmax(progress.first_s, initial=began))
    before_drain = record.tokens_by(drain, simulation.settings.late_results)
    tokens = int(progress.generated.sum())
    return Summary(
        requests=len(load),
        failed=int(progress.refused.sum()),
        seconds=seconds,
        output_tokens=tokens,
        tokens_per_s=per_second(tokens, seconds),
        steady_tokens_per_s=per_second(before_drain, drain - began),
        slo_tokens_per_s=per_second(int(progress.generated[found.in_tpot].sum()), seconds),
        ttft=Spread.of(found.ttft),
        tpot=Spread.of(found.tpot),
        itl=Spread.of(record.gaps_s),
        slo_attainment=_over(float(found.in_time.sum()), len(load)),
        tpot_attainment=_over(float(found.in_tpot.sum()), len(load)),
    )


def _classes(load: Load, found: _Latencies) -> tuple[ClassSummary, ...]:
    kinds = np.unique(load.priority)[::-1].tolist()
    return tuple(_class_summary(kind, found, load.priority == kind) for kind in kinds)


def _class_summary(priority: int, found: _Latencies, members: BoolArray) -> ClassSummary:
    return ClassSummary(
        priority,
        requests=int(members.sum()),
        ttft=Spread.of(found.ttft[members]),
        tpot=Spread.of(found.tpot[members]),
        slo_attainment=float(found.in_time[members].mean()),
        tpot_attainment=float(found.in_tpot[members].mean()),
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
