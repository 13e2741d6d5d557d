"""What two servers on one machine had of a shared budget: figures, JSON and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ellm_sgl.client.division import SHARED
from ellm_sgl.serve.chat_load import ChatStream, LoadStatistics

NAMES = ("model A", "model B")
Burst = Sequence[ChatStream]


@dataclass(frozen=True)
class ServerFigures:
    """One server over all its bursts."""

    ttft_mean_s: float | None
    ttft_p99_s: float | None
    output_tokens_per_s: float
    """While it has a burst."""
    tpot_p99_ms: float | None
    longest_pause_s: float | None

    @staticmethod
    def of(bursts: Sequence[Burst]) -> ServerFigures:
        found = [LoadStatistics.of(streams) for streams in bursts]
        together = LoadStatistics.of([stream for streams in bursts for stream in streams])
        seconds = sum(f.seconds for f in found)
        tokens = sum(f.output_tokens for f in found)
        return ServerFigures(
            ttft_mean_s=together.ttft_mean_s,
            ttft_p99_s=together.ttft_p99_s,
            output_tokens_per_s=tokens / seconds if seconds else 0.0,
            tpot_p99_ms=together.tpot_p99_ms,
            longest_pause_s=together.longest_pause_s,
        )


@dataclass(frozen=True)
class Run:
    """Both servers in one of three ways."""

    name: str
    bursts: tuple[tuple[Burst, ...], ...]
    """By server."""
    most_bytes: tuple[int, int]
    """The most that each had committed,"""
    most_together: int
    """and that both had, at any look."""
    retractions: int
    integrity: str

    def by_server(self) -> Iterator[tuple[str, ServerFigures]]:
        for name, bursts in zip(NAMES, self.bursts, strict=True):
            yield name, ServerFigures.of(bursts)

    @property
    def streams(self) -> list[ChatStream]:
        return [s for bursts in self.bursts for streams in bursts for s in streams]

    @property
    def completed(self) -> int:
        return sum(stream.complete for stream in self.streams)

    def identical(self, reference: Run) -> int:
        """How many answers are those of `reference`."""
        pairs = zip(self.streams, reference.streams, strict=True)
        return sum(ours.same_output(theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class ColocatedReport:
    """The same bursts in three ways."""

    runs: tuple[Run, Run, Run]
    """`ALONE`, `HALVES`, `SHARED`."""
    memory_bytes: int
    """Of KV: both servers' together, and in `ALONE` each one's."""
    floor_bytes: int
    """That a server keeps of a shared budget."""
    seconds: float

    def failures(self) -> list[str]:
        """What keeps the demo from being a success, a line each."""
        lines = []
        alone, halves, shared = self.runs
        for run in self.runs:
            if (left := len(run.streams) - run.completed) > 0:
                lines.append(f"{run.name}: {left} chats are not complete")
            if run.integrity != "ok":
                lines.append(f"{run.name}: page table: {run.integrity}")
        for run in (halves, shared):
            if (differing := len(run.streams) - run.identical(alone)) > 0:
                lines.append(f"{run.name}: {differing} outputs differ from those of all memory")
        if shared.most_together > self.memory_bytes:
            lines.append(
                f"{shared.name}: {shared.most_together:,} bytes of {self.memory_bytes:,} committed"
            )
        return lines

    @property
    def ok(self) -> bool:
        """Every chat ended as it should, with the same text in all three ways, and the two together
        never had more than the budget. (How fast they were is a finding.)"""
        return not self.failures()

    def ratios(self) -> list[dict[str, float]]:
        """By server: p99 TTFT of that with a half, tokens/s of those with all memory."""
        alone, halves, shared = (dict(run.by_server()) for run in self.runs)
        return [
            {
                "ttft_p99_of_half": (shared[n].ttft_p99_s or 0) / (halves[n].ttft_p99_s or 1),
                "tokens_per_s_of_alone": shared[n].output_tokens_per_s
                / max(alone[n].output_tokens_per_s, 1e-9),
                "half_tokens_per_s_of_alone": halves[n].output_tokens_per_s
                / max(alone[n].output_tokens_per_s, 1e-9),
            }
            for n in NAMES
        ]

    def to_json(self) -> dict[str, object]:
        """One JSON document's worth: everything but the texts."""
        return {
            "ok": self.ok,
            "failures": self.failures(),
            "streams": len(self.runs[0].bursts[0][0]),
            "memory_bytes": self.memory_bytes,
            "floor_bytes": self.floor_bytes,
            "seconds": self.seconds,
            "ratios": dict(zip(NAMES, self.ratios(), strict=True)),
            "runs": [self._run_json(run) for run in self.runs],
        }

    def _run_json(self, run: Run) -> dict[str, object]:
        return {
            "name": run.name,
            "servers": {name: dataclasses.asdict(s) for name, s in run.by_server()},
            "most_bytes": run.most_bytes,
            "most_together_bytes": run.most_together,
            "retractions": run.retractions,
            "completed": run.completed,
            "identical_to_alone": run.identical(self.runs[0]),
        }


def render(report: ColocatedReport) -> RenderableType:
    """Table, explanation and verdict; fits 80 columns."""
    streams = len(report.runs[0].streams)
    title = Text(
        f"Two servers, {report.memory_bytes / 2**20:.0f} MiB of KV, bursts of "
        f"{len(report.runs[0].bursts[0][0])} chats by turns"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("memory", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("TTFT s\nmean/p99", "output\ntokens/s", "longest\npause s", "most MiB",
                    "same\noutput"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for run in report.runs:
        for place, (name, found) in enumerate(run.by_server()):
            table.add_row(
                "" if place else run.name,
                name,
                f"{_number(found.ttft_mean_s)}/{_number(found.ttft_p99_s)}",
                f"{found.output_tokens_per_s:.0f}",
                _number(found.longest_pause_s),
                f"{run.most_bytes[place] / 2**20:.0f}",
                "" if place else f"{run.identical(report.runs[0])}/{streams}",
                style="bold" if run.name == SHARED else "",
            )
    verdict = Text(
        f"outputs identical in all three: {report.runs[2].identical(report.runs[0])}/{streams}",
        style="bold green" if report.ok else "bold red",
    )
    failures = (Text(line, style="red") for line in report.failures())
    return Group(title, table, Text(summary(report) + "\n"), verdict, *failures)


def summary(report: ColocatedReport) -> str:
    """What sharing brought, as measured."""
    ratios = report.ratios()
    first = (f"{r['ttft_p99_of_half']:.2f}" for r in ratios)
    tokens = (f"{r['tokens_per_s_of_alone']:.2f}" for r in ratios)
    halves = (f"{r['half_tokens_per_s_of_alone']:.2f}" for r in ratios)
    most = report.runs[2].most_together
    return (
        f"p99 TTFT with a shared budget, of that with a static half: {' and '.join(first)}. "
        f"Tokens/s, of those with all memory alone: {' and '.join(tokens)} (with a half "
        f"{' and '.join(halves)}). Both together never had more than {most / 2**20:.0f} MiB. One "
        "run each: compare them with care where other programs run beside."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
