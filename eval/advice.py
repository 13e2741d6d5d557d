"""What to set for a model on a machine, and why: from the latency model of a decode step.

All requests are alike here, as many as memory holds, and nothing is learnt: what a load of its own
lengths and arrivals does, `ellm-sgl simulate` tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ellm_sgl.client.traces import Trace
from ellm_sgl.eval.simulator import Load, Machine, Settings, simulate
from ellm_sgl.eval.simulator.engine import Tick
from ellm_sgl.eval.simulator.restoring import RESTORATIONS, RestoringModel
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.latency.partition import hidden_layers

WAYS = {"recompute": "recompute", "swap": "fetch from the host", "both": "both at once"}
"""Keys of `RESTORATIONS`, and what they are called."""
BUDGET = 0.1
"""By how much restoring may lengthen a step before it is no longer small."""
PAYS = 0.02
"""Gain below which a way is not worth its setting."""
TINY = 1e-9
RATIOS = np.arange(0.0, 0.8, 0.01)
MOST_RUNNING = 256
GROUPS = 4
"""Layer groups that fetching needs to gain memory."""
POINTS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Memory sizes of a plot, in multiples of the machine's."""
PLOTTED = ("ellm", "swap", "recompute")
MOST_PLOTTED = 200
"""Requests of a plot's load."""


@dataclass(frozen=True)
class Shapes:
    """What requests are like."""

    prompt_tokens: int
    output_tokens: int

    @property
    def mean_tokens(self) -> float:
        """Of a request that is half done."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Way:
    """One way of bringing missing KV back."""

    name: str
    tokens: int
    """That a step of full memory can restore while it takes no more than `BUDGET` longer,"""
    share: float
    """as a share of the KV on the device."""
    ratio: float
    """The uncached ratio at which it decodes most tokens per second,"""
    gain: float
    """so many times those with nothing missing,"""
    step_s: float
    """in steps of this length."""


@dataclass(frozen=True)
class Setting:
    """One flag."""

    flag: str
    value: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What was found."""

    machine: str
    kv_tokens: int
    kv_bytes_per_token: int
    requests: int
    """That memory holds with nothing missing."""
    step_s: float
    """Time of their decode step."""
    ways: tuple[Way, ...]
    settings: tuple[Setting, ...]


def advise(machine: Machine, shapes: Shapes, tpot_slo_s: float = math.inf) -> Advice:
    """Advice for requests of one shape that are limited by memory.

    Args:
        tpot_slo_s: no step may be longer.

    Raises:
        ValueError: not one request fits, not even with most of it missing.
    """
    held = machine.kv_tokens / shapes.mean_tokens
    if held / (1 - RATIOS[-1]) < 1:
        raise ValueError(
            f"{machine.name}: a request of {shapes.mean_tokens:,.0f} tokens is larger than "
            f"{machine.kv_tokens:,} KV tokens even with {RATIOS[-1]:.0%} of it missing"
        )
    requests = int(min(max(held, 1), MOST_RUNNING))
    ways = tuple(_way(machine, shapes, name, tpot_slo_s) for name in WAYS)
    full = float(_model(machine, "recompute").step_seconds(_step(requests, shapes, 0.0)))
    bytes_per_token = machine.shape.kv_bytes_per_token * machine.ranks
    settings = tuple(_settings(machine, shapes, ways, full, tpot_slo_s))
    return Advice(machine.name, machine.kv_tokens, bytes_per_token, requests, full, ways, settings)


def _model(machine: Machine, way: str) -> RestoringModel:
    inner = RooflineLatencyModel(machine.shape, machine.profile)
    return RestoringModel(inner, machine, RESTORATIONS[way])


def _step(requests: np.ndarray | int, shapes: Shapes, ratio: np.ndarray | float) -> StepWork:
    span = shapes.mean_tokens * ratio
    return StepWork(
        decode_rows=requests,
        decode_tokens=requests * shapes.mean_tokens,
        restored_tokens=requests * span,
        restored_squares=requests * span**2,
        swap_tokens=requests * span,
        recompute_share=0.0,  # the host has all of it
    )


def _way(machine: Machine, shapes: Shapes, name: str, tpot_slo_s: float) -> Way:
    model = _model(machine, name)
    held = machine.kv_tokens / shapes.mean_tokens
    requests = np.minimum(held / (1 - RATIOS), MOST_RUNNING)
    # A tiny span in place of none: the model then goes the same way for all of them.
    seconds = model.step_seconds(_step(requests, shapes, np.maximum(RATIOS, TINY)))
    speeds = np.where((requests >= 1) & (seconds <= tpot_slo_s), requests / seconds, 0.0)
    best = int(speeds.argmax())
    whole = np.array([min(max(held, 1), MOST_RUNNING)])
    [alone] = model.step_seconds(_step(whole, shapes, np.array([TINY]))).tolist()
    shares = np.geomspace(1e-5, 1, 2000)
    longer = model.step_seconds(_step(whole, shapes, shares))
    small = shares[longer <= (1 + BUDGET) * alone]
    share = float(small.max()) if len(small) else 0.0
    tokens = int(share * float(whole[0]) * shapes.mean_tokens)
    gain = float(speeds[best]) * alone / float(whole[0])
    return Way(name, tokens, share, float(RATIOS[best]), gain, float(seconds[best]))


def _settings(
    machine: Machine, shapes: Shapes, ways: tuple[Way, ...], full_s: float, tpot_slo_s: float
) -> list[Setting]:
    recompute, swap, both = ways
    best = max(ways, key=lambda way: way.gain)
    found = []
    if machine.kv_tokens < shapes.mean_tokens:
        why = "one request is larger than memory: stock SGLang would abort it"
    elif best.gain >= 1 + PAYS:
        why = f"where memory is the limit, {best.gain:.2f} times the tokens/s at r = {best.ratio:g}"
    else:
        why = (
            "more requests at once gain nothing here: it avoids retractions and stalls, and serves "
            "requests larger than memory"
        )
    found.append(Setting("--ellm-policy", "fcfs", why))
    fetching = max(swap, both, key=lambda way: way.gain)
    if fetching.gain >= recompute.gain + PAYS or swap.tokens > recompute.tokens:
        ratio = fetching.ratio or 0.5
        tokens = int(machine.kv_tokens * ratio / (1 - ratio))
        if machine.host_tokens is not None:
            tokens = min(tokens, machine.host_tokens)
        size = tokens * machine.shape.kv_bytes_per_token * machine.ranks / 1e9
        why = (
            f"a step fetches {swap.tokens:,} tokens where it recomputes {recompute.tokens:,}; "
            f"{size:.1f} GB hold what is missing at r = {ratio:g}"
        )
        found.append(Setting("--ellm-host-kv-tokens", str(tokens), why))
        found.append(_kept(machine))
        groups = max(machine.shape.layers // GROUPS, 1)
        why = f"with host memory {GROUPS} groups or more; {machine.shape.layers} layers"
        found.append(Setting("--ellm-layer-group", str(min(groups, 4)), why))
    else:
        why = "recomputing is as good here, and needs no memory"
        found.append(Setting("--ellm-host-kv-tokens", "0", why))
    if math.isfinite(tpot_slo_s):
        why = (
            "as asked; even nothing missing takes longer: it cannot be kept with full memory"
            if full_s > tpot_slo_s
            else f"as asked; a step takes {full_s * 1e3:.1f} ms with nothing missing"
        )
        found.append(Setting("--ellm-tpot-slo-ms", f"{tpot_slo_s * 1e3:g}", why))
    else:
        why = f"throughput decides: steps of {full_s * 1e3:.1f} to {best.step_s * 1e3:.1f} ms"
        found.append(Setting("--ellm-tpot-slo-ms", "leave it out", why))
    return found


def _kept(machine: Machine) -> Setting:
    layers = machine.shape.layers
    hidden = hidden_layers(machine.shape, machine.profile)
    value = {0: "kv", layers: "hidden"}.get(hidden, str(hidden))
    why = {
        "kv": "hidden states would be more to fetch, or take too long to project",
        "hidden": "projecting all layers is faster than fetching their KV",
    }.get(value, f"hidden states of {hidden} of {layers} layers balance link and processor")
    return Setting("--ellm-host-keeps", value, why)


@dataclass(frozen=True)
class Point:
    """One simulation of a plot."""

    mode: str
    kv_tokens: int
    tokens_per_s: float


def over_memory(machine: Machine, shapes: Shapes, tick: Tick | None = None) -> list[Point]:
    """Tokens per second of eLLM, and of servers that move whole requests, with less and with more
    memory than the machine has, for a load that needs twice what it has, all at once.

    Args:
        tick: called with the number of simulations that are done.
    """
    whole = shapes.prompt_tokens + shapes.output_tokens
    count = int(min(max(2 * machine.kv_tokens / whole, 8), MOST_PLOTTED))
    memory = min(machine.kv_tokens, int(count * whole / 2))
    prompts, outputs = np.full(count, shapes.prompt_tokens), np.full(count, shapes.output_tokens)
    load = Load.of(Trace(np.zeros(count), prompts, outputs))
    points = []
    for done, (part, mode) in enumerate((p, m) for p in POINTS for m in PLOTTED):
        tokens = int(part * memory)
        report = simulate(machine.limited(tokens, None), Settings(mode), load)
        points.append(Point(mode, tokens, report.summary.tokens_per_s))
        if tick is not None:
            tick(done + 1)
    return points
