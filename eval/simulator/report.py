"""Figures of a simulation, in the terms of a replay against a real server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.summary import Spread, Summary, per_second
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.eval.simulator.engine import Simulation, Tick
from ellm_sgl.eval.simulator.load import Load
from ellm_sgl.eval.simulator.machines import Machine
from ellm_sgl.eval.simulator.record import Record, Sample
from ellm_sgl.eval.simulator.settings import Settings

SERIES_POINTS = 400
"""Points of a time series that are kept."""


@dataclass(frozen=True)
class SimReport:
    """One server, one load."""

    machine: str
    settings: Settings
    summary: Summary
    running_mean: float
    """Requests that decode together, averaged over decoding time."""
    uncached_share: float
    """Restored tokens over all tokens that decode steps read."""
    retractions: int
    refused: int
    """Requests larger than the device, which whole-request servers cannot take."""
    decode_steps: int
    decode_step_s: float
    """Mean time of a decode step."""
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
    return SimReport(
        machine=simulation.machine.name,
        settings=simulation.settings,
        summary=_summary(simulation, record),
        running_mean=_over(record.rows_s, record.decode_s),
        uncached_share=_over(record.restored_tokens, record.decoded_tokens),
        retractions=record.retractions,
        refused=int(simulation.progress.refused.sum()),
        decode_steps=record.decode_steps,
        decode_step_s=_over(record.decode_s, record.decode_steps),
        fragmentation=1 - _over(record.held_tokens, record.held_places),
        recomputed_prompt_share=_over(record.prefill_rows, prompts) - 1,
        fallbacks=dict(failures),
        wall_s=record.wall_s,
        series=tuple(record.samples[:: max(len(record.samples) // SERIES_POINTS, 1)]),
    )


def _summary(simulation: Simulation, record: Record) -> Summary:
    load, progress = simulation.load, simulation.progress
    served = ~progress.refused
    ttft = (progress.first_s - load.at_s)[served]
    decoded = (progress.generated - 1)[served]
    spent = (progress.last_s - progress.first_s)[served]
    tpot = np.where(decoded > 0, spent / np.maximum(decoded, 1), np.nan)
    in_tpot = ~(tpot > load.tpot_slo_s[served])
    in_time = in_tpot & ~(ttft > load.ttft_slo_s[served])
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
        slo_tokens_per_s=per_second(int(progress.generated[served][in_tpot].sum()), seconds),
        ttft=Spread.of(ttft),
        tpot=Spread.of(tpot),
        itl=Spread.of(record.gaps_s),
        slo_attainment=_over(float(in_time.sum()), len(load)),
        tpot_attainment=_over(float(in_tpot.sum()), len(load)),
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
