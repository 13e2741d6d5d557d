"""What the demo found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ellm_sgl.serve.stream_record import LoadStatistics, StreamRecord


@dataclass(frozen=True)
class Restoration:
    """What eLLM did to keep all requests running."""

    evicted_units: int
    restored_units: int
    recomputed_tokens: int
    """Summed over the steps: one missing token is recomputed in every step until it is back."""
    fetched_units: int
    """Copied back from host memory for a step, summed over the steps."""
    lowest_cached_ratio: float
    """Mean over the requests, at the tightest moment that was looked at."""
    integrity: str


@dataclass(frozen=True)
class ServerRun:
    """One server under the load."""

    name: str
    pool_tokens: int
    records: tuple[StreamRecord, ...]
    retractions: int
    """As SGLang's own log counts them."""
    start_s: float
    """From the command to the first healthy answer."""
    other_cores: float
    """Cores that other programs kept busy meanwhile, on average."""
    attention: str
    """Whose attention ran: SGLang's name of the backend, or eLLM's."""
    restoration: Restoration | None = None
    """None for stock SGLang."""

    @property
    def statistics(self) -> LoadStatistics:
        return LoadStatistics.of(self.records)

    @property
    def completed(self) -> int:
        return sum(record.complete for record in self.records)

    @property
    def needed_tokens(self) -> int:
        """Tokens of KV that all requests together would hold at their ends."""
        return sum(r.prompt_tokens + r.output_tokens for r in self.records)

    def identical(self, reference: ServerRun) -> int:
        """How many answers are those of `reference`."""
        pairs = zip(self.records, reference.records, strict=True)
        return sum(ours.same_output(theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class DemoReport:
    """The same load on three servers, one after the other."""

    ample: ServerRun
    """Stock SGLang with room for everything: the reference for outputs."""
    stock: ServerRun
    """Stock SGLang with the small pool."""
    ellm: ServerRun
    """eLLM with the same small pool."""
    seconds: float
    """The whole demo."""

    @property
    def runs(self) -> tuple[ServerRun, ...]:
        return self.ample, self.stock, self.ellm

    @property
    def identical(self) -> int:
        """Answers of eLLM that equal the reference's."""
        return self.ellm.identical(self.ample)

    @property
    def ok(self) -> bool:
        """Every request ended as it should, and eLLM changed no output. (What stock SGLang does
        in a small pool is a finding, not a failure.)"""
        return not self.failures()

    def failures(self) -> list[str]:
        """What keeps the demo from being a success, a line each."""
        lines = [
            f"{run.name}, {record.topic}: not complete ({record.finish})"
            for run in (self.ample, self.ellm)
            for record in run.records
            if not record.complete
        ]
        lines += [
            f"{self.ellm.name}, {ours.topic}: the output differs from the reference"
            for ours, theirs in zip(self.ellm.records, self.ample.records, strict=True)
            if not ours.same_output(theirs)
        ]
        if self.ellm.restoration and self.ellm.restoration.integrity != "ok":
            lines.append(f"page table: {self.ellm.restoration.integrity}")
        return lines

    def to_json(self) -> dict[str, object]:
        """One JSON document's worth: everything but the texts."""
        return {
            "ok": self.ok,
            "streams": len(self.ample.records),
            "outputs_identical": self.identical,
            "needed_tokens": self.ample.needed_tokens,
            "pool_tokens": self.ellm.pool_tokens,
            "seconds": self.seconds,
            "runs": [self._run_json(run) for run in self.runs],
        }

    def _run_json(self, run: ServerRun) -> dict[str, object]:
        return {
            "name": run.name,
            "pool_tokens": run.pool_tokens,
            "start_s": run.start_s,
            "other_cores": run.other_cores,
            "attention": run.attention,
            **dataclasses.asdict(run.statistics),
            "retractions": run.retractions,
            "completed": run.completed,
            "identical_to_reference": run.identical(self.ample),
            "finish_reasons": [record.finish for record in run.records],
            "restoration": run.restoration and dataclasses.asdict(run.restoration),
        }
