"""What real servers on this machine did: the JSON of the measuring commands, for the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import Range
from ellm_sgl.eval.validate.results import MEASURES

COMMANDS = (
    "ellm-sgl compare",
    "python -m ellm_sgl.eval.validate",
    "ellm-sgl bench load-sweep",
    "ellm-sgl bench layer-groups",
    "ellm-sgl bench fusion",
    "ellm-sgl bench rotation",
)
"""Those whose `--json` is understood."""
_FIGURES = Range(0, 10**12)
_OTHER_SHAPES = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
VALIDATED = ("latency_model", *MEASURES)
"""Figures that `eval.validate` has errors of."""


@dataclass(frozen=True)
class Gain:
    """eLLM beside the best baseline under one load."""

    load: str
    best: str
    slo_tokens_per_s: float
    """Of eLLM, over the baseline's: tokens of requests within their SLO."""
    ttft: float
    """Of the baseline, over eLLM's."""


@dataclass(frozen=True)
class Validated:
    """One model's configurations, simulated and run."""

    configurations: int
    errors: dict[str, float]
    """MAPE, by figure."""


@dataclass(frozen=True)
class HostMemory:
    """What host memory brings that takes in prompts: with it over without."""

    ttft: float
    """Of the mean."""
    tokens_per_s: float
    under_way: float
    """Requests that have begun and have not ended."""


@dataclass(frozen=True)
class Measured:
    """What was found; nothing where a command was not run."""

    validated: dict[str, Validated] = field(default_factory=dict)
    """The simulator against real servers, by model."""
    gains: tuple[Gain, ...] = ()
    goodputs: tuple[tuple[float, float], ...] = ()
    """Goodput of eLLM and of stock SGLang, by seed."""
    fragmentation: dict[int, float] = field(default_factory=dict)
    """By F; of the page table, with requests of the paper's lengths."""
    table_shares: dict[int, float] = field(default_factory=dict)
    """By F: the page table's share of a server's time, half of the KV restored."""
    fused: dict[str, float] = field(default_factory=dict)
    """By load: time of a step in one pass over that in two."""
    host_memory: HostMemory | None = None

    @property
    def configurations(self) -> int:
        """That were validated."""
        return sum(v.configurations for v in self.validated.values())

    def error(self, figure: str) -> float | None:
        """MAPE over all of them; None of none."""
        errors = [v.configurations * v.errors[figure] for v in self.validated.values()]
        return sum(errors) / self.configurations if errors else None


def read_measured(paths: Sequence[Path]) -> Measured:
    """Read what `COMMANDS` printed with `--json`; of two files of one command the last counts,
    but loads of `ellm-sgl compare` and models of `eval.validate` are put together.

    Raises:
        ConfigError: a file cannot be read, or is something else.
    """
    found = Measured()
    for path in paths:
        try:
            found = _with(found, json.loads(path.read_text()))
        except (OSError, RecursionError, *_OTHER_SHAPES) as error:
            raise ConfigError(
                f"{path}: not the JSON of {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}: {error!r}"
            ) from None
    return found


def _with(found: Measured, document: Any) -> Measured:
    match document:
        case {"mape": _, "models": models}:
            return replace(found, validated=found.validated | dict(map(_validated, models)))
        case {"ratios": ratios, "scenario": scenario}:
            model = Path(scenario["model_path"] or "demo model").name
            return replace(found, gains=found.gains + tuple(_gain(model, r) for r in ratios))
        case {"goodput": {"ellm": ours, "stock": theirs}}:
            pairs = zip(ours["by_seed"], theirs["by_seed"], strict=True)
            return replace(found, goodputs=tuple((_figure(a), _figure(b)) for a, b in pairs))
        case {"server": servers, "table": table}:
            shares = {
                s["layer_group"]: _figure(s["page_table_share"]) for s in servers if s["ratio"]
            }
            wasted = {t["layer_group"]: _figure(t["fragmentation"]) for t in table}
            return replace(found, table_shares=shares, fragmentation=wasted)
        case {"bench": "rotation", "ratios": ratios}:
            gains = {ratio["figure"]: _figure(ratio["median"]) for ratio in ratios}
            names = "ttft_mean", "tokens_per_s", "mean_under_way"
            return replace(found, host_memory=HostMemory(*(gains[name] for name in names)))
        case {"loads": loads}:
            return _with(found, loads)
        case [{"separate_ms": _}, *_]:
            loads = {f"{c['requests']} x {c['prompt_tokens']} tokens": c for c in document}
            fused = {load: 1 / _figure(c["ratio"]) for load, c in loads.items()}
            return replace(found, fused=fused)
    raise ValueError("its keys are none of theirs")


def _validated(model: dict[str, Any]) -> tuple[str, Validated]:
    errors = {name: _figure(model["mape"][name]) for name in VALIDATED}
    return model["model_path"], Validated(len(model["configurations"]), errors)


def _gain(model: str, ratios: dict[str, Any]) -> Gain:
    cell = ratios["cell"]
    return Gain(
        load=f"{model}, {cell['factor']:g} x memory, output lengths {cell['outputs']}",
        best=ratios["best"],
        slo_tokens_per_s=_figure(ratios["of_best"]),
        ttft=1 / _figure(ratios["ttft_mean_of_best"]),
    )


def _figure(value: Any) -> float:
    """One that is used; files may hold nan where nothing was measured, which is for no table."""
    _FIGURES.check("a figure", value)
    return float(value)
