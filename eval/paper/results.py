"""Results of all jobs, by figure, and the comparisons that the report makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ellm_sgl.eval.paper.bounds import Bounds
from ellm_sgl.eval.paper.jobs import Done
from ellm_sgl.eval.paper.measured import Measured
from ellm_sgl.eval.simulator import MODES
from ellm_sgl.policies.testing.bench import PolicyBench

BASELINES = MODES[1:]


@dataclass(frozen=True)
class Results:
    """Everything that the report is made of."""

    done: Sequence[Done]
    bounds: Sequence[Bounds]
    decisions: dict[str, PolicyBench]
    """Times of the policies' answers, on this machine."""
    table_seconds: dict[int, float]
    """By F: the page table's bookkeeping of one decode step, on this machine."""
    latency_model: str
    scale: float
    measured: Measured
    """What real servers did."""

    def of(self, figure: str) -> list[Done]:
        return [d for d in self.done if d.job.figure == figure]

    def variants(self, figure: str) -> dict[str, list[Done]]:
        """Results of a figure by variant, each along the figure's axis; of several at one place,
        the one with the most requests within their SLOs, then with the most tokens per second."""
        found: dict[str, dict[float, Done]] = {}
        for done in self.of(figure):
            group = found.setdefault(done.job.variant, {})
            if done.job.x not in group or _merit(done) > _merit(group[done.job.x]):
                group[done.job.x] = done
        return {name: [group[x] for x in sorted(group)] for name, group in found.items()}

    @property
    def goodputs(self) -> dict[str, float]:
        """Of each mode, at the better of its settings, in requests per second."""
        found: dict[str, float] = {}
        for done in self.of("15"):
            found[done.job.variant] = max(found.get(done.job.variant, 0.0), done.goodput)
        return found

    def comparisons(self) -> Iterator[Comparison]:
        """eLLM beside the best baseline, per load of Figs. 10 and 12."""
        groups: dict[tuple[str, str], list[Done]] = {}
        for done in self.of("10"):
            groups.setdefault((done.job.machine, done.job.load.data_set), []).append(done)
        for (machine, data_set), group in groups.items():
            yield Comparison(machine, data_set, group)


@dataclass(frozen=True)
class Comparison:
    """One load, all modes, each at two settings of SGLang's conservativeness."""

    machine: str
    data_set: str
    runs: Sequence[Done]

    @property
    def load(self) -> str:
        return f"{self.machine}, {self.data_set}"

    def best(self, mode: str) -> Done:
        """The better of a mode's two settings, by tokens per second."""
        return max(
            (d for d in self.runs if d.job.variant == mode),
            key=lambda d: d.sim.summary.tokens_per_s,
        )

    @property
    def gains(self) -> dict[str, float]:
        """Tokens per second of eLLM over each baseline, each at its better setting."""
        ours = self.best("ellm").sim.summary.tokens_per_s
        return {m: ours / self.best(m).sim.summary.tokens_per_s for m in BASELINES}

    @property
    def ttft_gains(self) -> dict[str, float]:
        """TTFT of each baseline over eLLM's."""
        ours = self.best("ellm").sim.summary.ttft.mean
        return {m: self.best(m).sim.summary.ttft.mean / ours for m in BASELINES}

    @property
    def refused(self) -> int:
        """Requests that the baselines cannot take at all."""
        return max(d.sim.refused for d in self.runs)


def _merit(done: Done) -> tuple[float, float]:
    summary = done.sim.summary
    return summary.slo_attainment, summary.tokens_per_s
