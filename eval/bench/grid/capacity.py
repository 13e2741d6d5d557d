"""How much a machine can sustain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ellm_sgl.eval.simulator import Machine, Settings
from ellm_sgl.eval.simulator.settings import device_model
from ellm_sgl.latency import StepWork


@dataclass(frozen=True)
class Kind:
    """Requests by their means, in tokens."""

    prompt: float
    output: float
    share: float = 1.0
    """Of all requests."""


@dataclass(frozen=True)
class Capacity:
    """What a machine can sustain of some requests."""

    requests_per_s: float
    token_s: float
    """Time per output token then, prompts between the steps included."""


def mean_tokens(kinds: Sequence[Kind]) -> float:
    """Of a request that runs, half of its answer written: who has a longer one runs for longer."""
    output = mean_output(kinds)
    return sum(k.share * k.output / output * (k.prompt + k.output / 2) for k in kinds)


def mean_output(kinds: Sequence[Kind]) -> float:
    """Tokens of an answer."""
    return sum(k.share * k.output for k in kinds)


def capacity(machine: Machine, kinds: Sequence[Kind], room: float) -> Capacity:
    """With so many of these requests running at a time."""
    step, output = device_model(machine, Settings()).step_seconds, mean_output(kinds)
    batch = min(room, Settings().max_running)
    prompt_s = sum(
        k.share * float(step(StepWork(0, 0, prefill_rows=k.prompt, prefill_pairs=k.prompt**2 / 2)))
        for k in kinds
    )
    decode_s = float(step(StepWork(batch, batch * mean_tokens(kinds))))
    token_s = decode_s + batch * prompt_s / output
    return Capacity(batch / (output * token_s), token_s)
