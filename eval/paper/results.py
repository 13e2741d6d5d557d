"""Everything that the report is made of: results of all jobs, by figure, the comparisons that it
makes of them, and what is measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ellm_sgl.client.summary import ATTAINMENT
from ellm_sgl.eval.paper.bounds import Bounds, bounds
from ellm_sgl.eval.paper.claims import MAX_RUNNING, Case
from ellm_sgl.eval.paper.elastic import plan as elastic
from ellm_sgl.eval.paper.jobs import Done, distinct, run_all
from ellm_sgl.eval.paper.measured import Measured
from ellm_sgl.eval.paper.overheads import Overheads, measure
from ellm_sgl.eval.paper.plan import GROUPS, plan
from ellm_sgl.eval.simulator import Settings, preset
from ellm_sgl.eval.simulator.machines import PRESETS

STEADY = 2.0
"""A load's mean TTFT over the lowest load's, up to which it counts as steady."""


@dataclass(frozen=True)
class Results:
    """Everything that the report is made of."""

    done: Sequence[Done]
    bounds: Sequence[Bounds]
    overheads: Overheads
    """Timed on this machine."""
    latency_model: str
    scale: float
    measured: Measured
    """What real servers did."""

    @property
    def settings(self) -> Settings:
        """Of the simulated devices, for bounds."""
        return Settings(latency_model=self.latency_model, max_running=MAX_RUNNING)

    def of(self, figure: str) -> list[Done]:
        return [d for d in self.done if d.job.figure == figure]

    def by_case(self, figure: str) -> dict[Case, list[Done]]:
        found: dict[Case, list[Done]] = {}
        for done in self.of(figure):
            found.setdefault(done.job.case, []).append(done)
        return found

    def comparisons(self) -> Iterator[Comparison]:
        """Figs. 10 to 12, per load."""
        return (Comparison(case, runs) for case, runs in self.by_case("10").items())

    def sweeps(self) -> Iterator[Sweep]:
        """Figs. 14 and 15, per load and mode."""
        for case, runs in self.by_case("14").items():
            for mode, line in by_variant(runs).items():
                yield Sweep(case, mode, line)


def by_variant(runs: Sequence[Done]) -> dict[str, list[Done]]:
    """Each variant's runs, along the figure's axis."""
    found: dict[str, list[Done]] = {}
    for done in sorted(runs, key=lambda d: d.job.x):
        found.setdefault(done.job.variant, []).append(done)
    return found


def by_data_set(runs: Sequence[Done]) -> dict[str, list[Done]]:
    """Each data set's runs."""
    found: dict[str, list[Done]] = {}
    for done in runs:
        found.setdefault(done.job.load.data_set, []).append(done)
    return found


@dataclass(frozen=True)
class Comparison:
    """One load, all modes and admissions; SGLang's admission at two settings of it."""

    case: Case
    runs: Sequence[Done]

    @property
    def load(self) -> str:
        return ", ".join(self.case)

    def best(self, variant: str) -> Done:
        """The better of a variant's settings, by tokens per second within the SLO."""
        runs = (d for d in self.runs if d.job.variant == variant)
        return max(runs, key=lambda d: d.sim.summary.slo_tokens_per_s)

    def baseline(self, mode: str, admission: str = "paper") -> Done:
        return self.best(mode if mode == "ellm" else f"{mode}, {admission}")


@dataclass(frozen=True)
class Sweep:
    """One mode under rising load."""

    case: Case
    mode: str
    runs: Sequence[Done]
    """By load."""

    @property
    def knee(self) -> float:
        """Largest load up to which mean TTFT is at most `STEADY` times that at the lowest."""
        first = self.runs[0].sim.summary.ttft.mean
        return self._up_to(lambda d: d.sim.summary.ttft.mean <= STEADY * first)

    @property
    def goodput(self) -> float:
        """Largest load up to which `ATTAINMENT` of the requests are within their TPOT SLO; 0: not
        even the lowest."""
        return self._up_to(lambda d: d.sim.summary.tpot_attainment >= ATTAINMENT)

    def _up_to(self, holds: Callable[[Done], bool]) -> float:
        last = 0.0
        for done in self.runs:
            if not holds(done):
                break
            last = done.job.x
        return last


def evaluate(
    scale: float,
    latency_model: str,
    workers: int,
    measured: Measured,
    begin: Callable[[int], None],
    tick: Callable[[Done], None],
) -> Results:
    """Simulate and measure all that the report shows.

    Args:
        scale: of the number of requests; 1 is the full evaluation.
        latency_model: "roofline" or "paper".
        workers: processes.
        measured: what real servers did.
        begin: called with the number of simulations.
        tick: called as each is done.
    """
    overheads = measure(GROUPS)  # first, while this machine is quiet
    jobs = [*plan(scale, latency_model), *elastic.plan(scale, latency_model)]
    begin(len(distinct(jobs)))
    done = run_all(jobs, workers, tick)
    limits = [bounds(preset(name), Settings(latency_model=latency_model)) for name in PRESETS]
    return Results(done, limits, overheads, latency_model, scale, measured)
