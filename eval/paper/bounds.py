"""What bounds a gain on a machine, by the latency model alone: no simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ellm_sgl.client.workloads import LENGTHS
from ellm_sgl.eval.paper.claims import FUSED_RATIO
from ellm_sgl.eval.simulator import Machine, Settings
from ellm_sgl.eval.simulator.settings import device_model
from ellm_sgl.latency import StepWork

TOKENS = 895
"""Of a ShareGPT request half way through its output: 222 + 1346 / 2."""


@dataclass(frozen=True)
class Bounds:
    """Of requests of `TOKENS` tokens that fill device memory. Times in seconds."""

    machine: str
    requests: int
    """b that fills memory."""
    step_s: float
    """Their decode step, all cached."""
    fixed_s: float
    """The part of it that does not depend on them: overhead, reading the weights."""
    free_swap: float
    """Tokens that can be fetched while that step runs, as a share of device memory."""
    free_recompute: float
    """Tokens that can be recomputed before they lengthen that step by 1 %, likewise."""
    throughput_ceiling: float
    """Tokens per second with any number of further requests whose KV is restored at no cost, over
    those of a full memory: 1 + fixed / (step - fixed). No policy can do better."""
    fused_tpot: float
    """Step with r = 0.4 recomputed in one pass with the decode rows, over two passes."""


def bounds(machine: Machine, settings: Settings) -> Bounds:
    """What bounds a server with these settings."""
    fused = device_model(machine, replace(settings, restore="recompute"))
    apart = device_model(machine, replace(settings, restore="recompute", fused=False))
    requests = max(machine.kv_tokens // TOKENS, 1)

    def work(share: float) -> StepWork:
        n = share * TOKENS
        return StepWork(requests, float(requests * TOKENS), requests * n, requests * n * n)

    def seconds(of: StepWork) -> float:
        return float(fused.step_seconds(of))

    step_s = seconds(work(0.0))
    fixed_s = max(seconds(StepWork(1, 1.0)), 1e-12)
    token_s = machine.shape.kv_bytes_per_token / machine.profile.link_bytes_per_s
    growing = max(step_s - fixed_s, 1e-12)
    mixed = work(FUSED_RATIO)
    return Bounds(
        machine=machine.name,
        requests=requests,
        step_s=step_s,
        fixed_s=fixed_s,
        free_swap=step_s / token_s / machine.kv_tokens,
        free_recompute=_share_within(lambda share: seconds(work(share)), 1.01 * step_s),
        throughput_ceiling=1 + fixed_s / growing,
        fused_tpot=seconds(mixed) / float(apart.step_seconds(mixed)),
    )


def _share_within(seconds: Callable[[float], float], limit_s: float) -> float:
    """The largest share in [0, 1] whose step takes no longer than `limit_s`."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) <= limit_s else (low, middle)
    return low


def mean_tokens(data_set: str) -> tuple[float, float]:
    """Mean prompt and output tokens of a data set."""
    lengths = LENGTHS[data_set]
    return lengths.prompt.mean, lengths.output.mean


def capacity(machine: Machine, settings: Settings, data_set: str) -> float:
    """Requests per second that a machine serves with all KV on the device: prompts prefilled one
    after the other, and between them decode steps of a full memory, every request half way."""
    return served(machine, settings, *mean_tokens(data_set))


def served(machine: Machine, settings: Settings, prompt: float, output: float) -> float:
    """`capacity` for requests of these lengths."""
    device = device_model(machine, settings)
    tokens = prompt + output / 2
    batch = min(max(machine.kv_tokens // tokens, 1), settings.max_running)
    pairs = prompt * (prompt + 1) / 2
    prefill = device.step_seconds(StepWork(0, 0, prefill_rows=prompt, prefill_pairs=pairs))
    step = device.step_seconds(StepWork(batch, batch * tokens))
    return 1 / float(prefill + output * step / batch)


@dataclass(frozen=True)
class Restorable:
    """What one step can restore within an SLO, of requests that fill memory at some ratio."""

    requests: int
    """That fit with this ratio uncached."""
    ratio: float
    """The largest r at which their step is within the SLO."""
    step_s: float
    """Their step at the wanted ratio."""


def restorable(
    machine: Machine, settings: Settings, data_set: str, ratio: float, slo_s: float
) -> Restorable:
    """How much requests could restore in each step, against a ratio that is said to be theirs."""
    prompt, output = mean_tokens(data_set)
    tokens, device = prompt + output / 2, device_model(machine, settings)
    requests = int(min(machine.kv_tokens / (tokens * (1 - ratio)), settings.max_running))

    def seconds(share: float) -> float:
        n = share * tokens
        whole = requests * n, requests * n * n
        work = StepWork(
            requests, requests * tokens, *whole, swap_tokens=requests * n, recompute_share=0.0
        )
        return float(device.step_seconds(work))

    return Restorable(requests, _share_within(seconds, slo_s), seconds(ratio))
