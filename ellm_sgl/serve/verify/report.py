"""All comparisons of one model, and whether they prove that no output changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ellm_sgl.config.ranges import as_json_value
from ellm_sgl.serve.verify.figures import Comparison


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
        return tuple(self._failures())

    def _failures(self) -> Iterator[str]:
        compared = {c.dtype for c in self.comparisons}
        if not compared:
            yield "nothing was compared"
        for dtype in self.dtypes:
            if dtype not in compared:
                yield f"{dtype}: nothing was compared"
        for c in self.comparisons:
            if c.failure is not None:
                yield f"{c.dtype}, {c.setting}: {c.failure}"

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
