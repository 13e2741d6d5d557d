"""Where policies fall behind what they replace, simulated: tokens/s within the SLO, and the share
of requests within it.

fcfs and slo-priority against the best whole-request baseline, under SGLang's admission or vLLM's,
over machines, loads, kinds of lengths, SLOs, memory and ways to restore; rounds are seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import click

from ellm_sgl.eval.bench.grid.cells import MACHINES, Cell, grid, load_of, machine_of, named
from ellm_sgl.eval.bench.result import Column, Result, Table, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option
from ellm_sgl.eval.simulator import Load, Settings, simulate

POLICIES = ("fcfs", "slo-priority")
ADMISSIONS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    " 0.3": {"conservativeness": 0.3},
    " vllm": {"admission": "vllm"},
}
FLOOR, SLACK = 0.97, 0.02
"""Of the best baseline's tokens/s within the SLO, and by how much fewer requests may be within
it."""
GROUPS = 8
"""Of layers."""
WITHIN, ATTAINED = "slo_tokens_per_s", "tpot_attainment"


@dataclass(frozen=True)
class Verdict:
    """A policy in one cell, held against the best baseline there; medians over seeds."""

    cell: Cell
    policy: str
    best: str
    ratio: float
    """Of tokens/s within the SLO."""
    gain: float
    """In the share of requests within it."""

    @property
    def kept(self) -> bool:
        """No worse than the baseline, but for little."""
        return self.ratio >= FLOOR and round(self.gain, 9) >= -SLACK


@dataclass(frozen=True)
class Regret(Scenario):
    rounds: int = rounds_option(1)
    machines: tuple[str, ...] = option(
        tuple(MACHINES),
        about="Likewise, or a model on a device as `simulate` has it, CONFIG.json:DEVICE.",
        flag="--machine",
        metavar="NAME",
        multiple=True,
    )
    requests: int = option(100, click.IntRange(2, 10_000), "Of each cell.")
    every: int = option(1, click.IntRange(1, 1000), "Take every so many cells of the grid.")

    columns = (Column("tokens/s within the SLO", WITHIN), Column("within", ATTAINED, "{:.0%}"))

    def check(self) -> None:
        for machine in self.machines:
            named(machine)

    def starters(self) -> Mapping[str, Any]:
        return {"simulator": nullcontext}

    def settings(self) -> Sequence[Setting]:
        policies = (Setting(name, "simulator", {"policy": name}) for name in POLICIES)
        baselines = (
            Setting(mode + name, "simulator", {"mode": mode, **admission})
            for mode in ("recompute", "swap", "hcache")
            for name, admission in ADMISSIONS.items()
        )
        return [*policies, *baselines]

    def cells(self) -> tuple[Cell, ...]:
        return tuple(grid(self.machines))[:: self.every]

    def title(self, cell: Cell) -> str:
        return (
            f"{cell.machine}, {cell.load:g} x load, lengths {cell.lengths}, SLO {cell.slo}, "
            f"room for {cell.memory}, restore {cell.restore}, {_host(cell)}"
        )

    def warm_up(self, name: str, server: Any) -> None:
        """There is nothing to warm."""

    def load(self, cell: Cell, seed: int) -> tuple[Cell, Load]:
        return cell, load_of(cell, self.requests, seed)

    def measure(self, server: Any, setting: Setting, load: tuple[Cell, Load]) -> Taken:
        cell, requests = load
        machine = machine_of(cell)
        settings = Settings(
            restore=cell.restore,
            tpot_slo_s=float(requests.tpot_slo_s[0]),
            layer_group=max(machine.shape.layers // GROUPS, 1),
            **setting.value,
        )
        found = simulate(machine, settings, requests).summary
        return Taken({name: getattr(found, name) for name in (WITHIN, ATTAINED, "tokens_per_s")})

    def verdicts(self, result: Result) -> list[Verdict]:
        """Of every policy in every cell."""
        baselines = [s.name for s in self.settings() if s.name not in POLICIES]
        found = []
        for cell in self.cells():
            best = max(baselines, key=lambda name: result.median(cell, name, WITHIN))
            theirs = result.median(cell, best, WITHIN), result.median(cell, best, ATTAINED)
            for policy in POLICIES:
                ours = result.median(cell, policy, WITHIN), result.median(cell, policy, ATTAINED)
                ratio = ours[0] / theirs[0] if theirs[0] else 1.0
                found.append(Verdict(cell, policy, best, ratio, ours[1] - theirs[1]))
        return found

    def tables(self, result: Result) -> list[Table]:
        verdicts = self.verdicts(result)
        whole = [("all", *_row(_of(verdicts, policy)), policy) for policy in POLICIES]
        parts = [
            (f"{field} {value}", *_row([r for r in own if getattr(r.cell, field) == value]), policy)
            for policy in POLICIES
            for own in [_of(verdicts, policy)]
            for field in Cell._fields
            for value in dict.fromkeys(getattr(r.cell, field) for r in own)
        ]
        headings = ("cells", "how\nmany", "worst", "median", "best", "kept", "attained\nworst")
        turned = tuple((row[-1], *row[:-1]) for row in (*whole, *parts))
        lost = tuple(
            (r.policy, self.title(r.cell), r.best, f"{r.ratio:.3f}", f"{r.gain:+.2f}")
            for r in verdicts
            if not r.kept
        )
        return [
            Table("tokens/s within the SLO, of the best baseline's", ("", *headings), turned),
            Table("Cells that fall short",
                  ("", "cell", "best baseline", "of its\ntokens/s", "attained"), lost),
        ]  # fmt: skip

    def notes(self, result: Result) -> list[str]:
        return [f"kept: at least {FLOOR} of the best baseline's, and attainment within {SLACK}."]

    def document(self, result: Result) -> dict[str, Any]:
        verdicts = [
            {"cell": r.cell._asdict(), "policy": r.policy, "best_baseline": r.best,
             "ratio": r.ratio, "attainment_gain": r.gain, "kept": r.kept}
            for r in self.verdicts(result)
        ]  # fmt: skip
        return {**super().document(result), "verdicts": verdicts}

    def plot(self, result: Result, figure: Any) -> None:
        """A heat map for each policy: machines, memory and loads by lengths and SLOs."""
        verdicts = self.verdicts(result)
        panels = figure.subplots(1, len(POLICIES), squeeze=False)[0]
        for panel, policy in zip(panels, POLICIES, strict=True):
            own = {(_across(r.cell), _down(r.cell)): r.ratio for r in _of(verdicts, policy)}
            across = list(dict.fromkeys(x for x, _ in own))
            down = list(dict.fromkeys(y for _, y in own))
            values = [[own.get((x, y), float("nan")) for x in across] for y in down]
            drawn = panel.imshow(values, vmin=0.8, vmax=1.2, cmap="RdYlGn", aspect="auto")
            panel.set_xticks(range(len(across)), across, rotation=90, fontsize=7)
            panel.set_yticks(range(len(down)), down, fontsize=7)
            panel.set(title=policy, xlabel="lengths, SLO")
        figure.colorbar(drawn, ax=panels, label="tokens/s within the SLO, of the best baseline's")
        figure.set_size_inches(13, 8)


def _of(verdicts: Sequence[Verdict], policy: str) -> list[Verdict]:
    return [r for r in verdicts if r.policy == policy]


def _row(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    ratios = sorted(r.ratio for r in verdicts)
    shown = (ratios[0], statistics.median(ratios), ratios[-1])
    kept = sum(r.kept for r in verdicts)
    worst = min(r.gain for r in verdicts)
    return str(len(ratios)), *(f"{x:.3f}" for x in shown), str(kept), f"{worst:+.2f}"


def _across(cell: Cell) -> str:
    return f"{cell.lengths}, {cell.slo}"


def _down(cell: Cell) -> str:
    memory = f"room for {cell.memory}, {_host(cell)}"
    return f"{cell.machine}, {memory}, {cell.load:g} x load, {cell.restore}"


def _host(cell: Cell) -> str:
    return "host unbounded" if cell.host is None else f"host {cell.host:g} x"
