"""What a comparison finds, what is expected of it, and what all of them prove."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ellm_sgl.config.ranges import as_json_value
from ellm_sgl.serve.verify.rounding import Spread

LOGPROB_TOLERANCE = 1e-4
"""Largest |Δ log-probability| accepted in fp32."""


@dataclass(frozen=True)
class Comparison:
    """One setting against the reference."""

    dtype: str
    setting: str
    failure: str | None
    """Why this is no proof, in words; None if it is one."""
    outputs: int
    differing: int
    """Outputs with a token that is not the reference's."""
    tokens: int
    """That are to be compared."""
    agreeing: int
    """Tokens equal to the reference's, each counted up to its output's first difference."""
    max_logprob_difference: float
    """Over the agreeing tokens; NaN if one of them is no number, or there are none."""
    forced: Spread | None
    """16 bits: against full caching that is given the same tokens,"""
    noise: Spread | None
    """and the same of stock SGLang between two batch sizes."""
    recomputed_tokens: int
    evicted_units: int
    fetched_units: int
    projected_units: int
    """Those of the fetched ones that came as hidden states."""
    stored_tokens: int
    """Read from the store on disk."""
    retractions: int
    pauses: int
    """Times that a running request was paused."""
    aborted: int
    """Streams that were given up in the middle."""
    resized: int
    """Times that the pool came to a random size while the load ran,"""
    at_floor: int
    """that it came as near to one as it could,"""
    overtaken: int
    """and that the next one was asked for before either."""
    integrity: str

    @property
    def agreement(self) -> float:
        """Share of the tokens; 0 if there are none."""
        return self.agreeing / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Expected:
    """What is expected of a setting beside the reference's outputs."""

    asked: Sequence[int] | None = None
    """Tokens asked for, of each output; as many as the reference has if None."""
    aborted: Sequence[bool] | None = None
    """Which outputs the client gave up in the middle; none if None."""
    needs: Sequence[str] = ()
    """Counts of `Comparison` that are 0 only if the setting did not do what it is for."""
    most_tokens: int = 0
    """Of the longest request; told then, because that is the usual reason."""
    resizes: Mapping[str, int] = field(default_factory=dict)
    """Of the pool, and what has become of them, as `/ellm/state` calls it."""
    forced: Spread | None = None
    noise: Spread | None = None
    """As in `Comparison`."""
    idle: Mapping[str, Any] | None = None
    """The server's state afterwards, with an empty prefix cache; not looked at if None."""


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons of one model."""

    model_path: str
    prompts: int
    output_tokens: int
    comparisons: tuple[Comparison, ...]
    dtypes: tuple[str, ...] = ()
    """That were asked for."""
    left_out: tuple[str, ...] = ()
    """Settings that this model or machine cannot run, each with the reason."""

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, a line each; a dtype without a comparison has failed."""
        compared = {c.dtype for c in self.comparisons}
        found = [] if compared else ["nothing was compared"]
        found += [f"{d}: nothing was compared" for d in self.dtypes if d not in compared]
        for c in self.comparisons:
            if c.failure is not None:
                found.append(f"{c.dtype}, {c.setting}: {c.failure}")
        return tuple(found)

    @property
    def passed(self) -> bool:
        """Every dtype asked for has a comparison, and each comparison is a proof."""
        return not self.failures

    def to_json(self) -> dict[str, object]:
        """The report as JSON's types; null stands for a number that is not finite."""
        rows = [dataclasses.asdict(c) | {"agreement": c.agreement} for c in self.comparisons]
        document = dataclasses.asdict(self) | {"comparisons": rows, "passed": self.passed}
        found: dict[str, object] = as_json_value(document | {"failures": self.failures})
        return found
