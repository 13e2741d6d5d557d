"""Measures the machine at start-up: real steps of the model served, on made-up requests.

Everything that a decoding step does on the device runs here as it will run later: the model's
layers, eLLM's attention, planning, recomputed rows. What SGLang's scheduler adds to a step cannot
run without requests: a figure measured once stands for it, until the online fit knows better.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import Range, shown
from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel
from ellm_sgl.latency.fit import fit_profile
from ellm_sgl.memory.step_room import Activations
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.mixes import FEW_ROWS, MEASURED_BYTES, MIXES, Mix
from ellm_sgl.sglang.peak_bytes import peak_bytes
from ellm_sgl.sglang.synthetic_steps import SyntheticSteps, synchronize

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

_PROBE_BYTES = 64 << 20
"""Size of the buffers that are read and copied: well beyond any cache."""
_UNIT_ELEMENTS = 4096
"""A unit's size, about: 16 KiB."""
_SCHEDULER_STEP_S, _SCHEDULER_ROW_S = 1.3e-3, 6e-5
"""Time between two forward passes, and its part per request: SGLang 0.5.17 with the demo model
on one core of an AMD EPYC. On a GPU it passes while the device computes."""
_SCHEDULER_TURN_S = 2e-3
"""The same, where SGLang turns from decoding to prompts or back: batches are put together, and the
prompts' results are dealt with beside the next step."""
_RESTORE_S = 2e-3
"""The same, in a step that restores anything: room is made, the step planned and its transfers
started, and every layer waits for its own. Steps of 14 to 16 requests got 2.5 to 3.5 ms longer with
their first 500 tokens; the online fit came to 0.8 to 2 ms of these, and gave the rest to others."""
_FETCH_SHARE = 1.6
"""Where the processor copies: 0.55 µs per token of the demo model, whose KV is 4 KB, beside 0.35 µs
for the copying itself. Calibration fetches nothing; the online fit corrects this."""
_DEVICE_FETCH_SHARE = 0.5
"""On a CUDA device what is fetched beside a step takes memory from it, and 32 programs."""
VARIABLE = "ELLM_SGL_CALIBRATION_S"
_SECONDS = 3.0
"""About how long to measure, where no variable says it."""
_RANGE = Range(0, 600)
_LARGEST_S = 0.3
"""A mix whose step would take longer is left out."""


def model_shape(model_config: ModelConfig, tp_size: int) -> ModelShape:
    """Sizes of the model as one of `tp_size` ranks holds it; KV in the model's dtype."""
    config = model_config.hf_text_config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    intermediate = getattr(config, "moe_intermediate_size", None) if experts else None
    element = torch.empty((), dtype=model_config.dtype).element_size()
    return ModelShape(
        layers=model_config.num_hidden_layers,
        hidden=model_config.hidden_size,
        heads=model_config.num_attention_heads // tp_size,
        kv_heads=model_config.get_num_kv_heads(tp_size),
        head_dim=model_config.head_dim,
        intermediate=(intermediate or config.intermediate_size) // tp_size,
        vocabulary=-(-model_config.vocab_size // tp_size),
        experts=experts or 1,
        experts_per_token=config.num_experts_per_tok if experts else 1,
        weight_bytes=element,
        kv_bytes=element,
    )


def shape_of(model_path: str, dtype: str) -> ModelShape:
    """`model_shape` of a model that is served on one rank, e.g. in dtype "float32"."""
    from sglang.srt.configs.model_config import ModelConfig

    return model_shape(ModelConfig(model_path, dtype=dtype), 1)


def calibrate(
    runner: ModelRunner, ours: Context, shape: ModelShape
) -> tuple[HardwareProfile, Activations]:
    """Measure what this rank's device sustains with the model loaded, and what a step takes of its
    memory. Nothing may be running.

    The page table is not touched; of the pool, only contents that nobody reads.

    Args:
        runner: has its model, pool and attention backend.
        ours: executor and pool, as used for serving.
        shape: of the model.

    Returns:
        The profile, and the activations: of CPU hosts; elsewhere they are not measured so far.
    """
    from sglang.srt.distributed import get_tp_group

    # All ranks must run the same steps, since each waits for the others' part: rank 0 decides.
    decided = get_tp_group().broadcast_object
    guess: HardwareProfile = decided(measure_device(runner.device))
    steps = SyntheticSteps(runner, ours)
    mixes: Sequence[Mix] = decided(_affordable(shape, guess, steps))
    first_of_kinds = {mix.kind: mix for mix in reversed(mixes)}.values()
    for mix in first_of_kinds:
        steps.run(mix)  # on a GPU the first step of a kind compiles kernels, for seconds
    deadline = time.perf_counter() + _seconds()
    samples: dict[Mix, list[float]] = {mix: [] for mix in mixes}
    for mix in itertools.cycle(mixes):
        if not samples[mix] and mix not in first_of_kinds:
            steps.run(mix)  # the first time is slower: memory is touched, kernels are chosen
        samples[mix].append(steps.run(mix))
        if decided(time.perf_counter() > deadline):
            break
    measured = [(mix.work, median(times)) for mix, times in samples.items() if times]
    profile: HardwareProfile = decided(fit_profile(shape, guess, measured))
    profile = with_scheduling(profile)
    if profile.name == "cuda":
        return profile, Activations()
    activations: Activations = decided(Activations.fit(measured_bytes(ours, steps, mixes)))
    return profile, activations


def measured_bytes(
    ours: Context, steps: SyntheticSteps, mixes: Sequence[Mix]
) -> list[tuple[int, int, int]]:
    """(rows, logit rows, bytes at the peak) of steps through SGLang's layers: compiled ones have
    buffers of their own, and any step may come to go through the others.

    Args:
        mixes: those that are affordable.
    """
    more = (mix for mix in steps.that_fit(MEASURED_BYTES) if mix in mixes)
    measured = dict.fromkeys((*steps.that_fit(FEW_ROWS), *more))
    with nullcontext() if ours.compiled is None else ours.compiled.aside():
        return [
            (mix.rows, mix.requests, peak_bytes(functools.partial(steps.run, mix)))
            for mix in measured
        ]


def _seconds() -> float:
    """About how long to measure.

    Raises:
        ConfigError: the variable is no number, or out of range.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return _SECONDS
    try:
        seconds = float(text)
        _RANGE.check(VARIABLE, seconds)
    except ValueError:
        raise ConfigError(f"{VARIABLE}={shown(text)}: give {_RANGE}, or leave it out") from None
    return seconds


def with_scheduling(profile: HardwareProfile) -> HardwareProfile:
    """The profile of a machine whose steps SGLang schedules, some of which fetch; measured were
    steps that do not, one after the other. It is the online fit's to correct: a time that is 0 has
    no factor that could."""
    if profile.name == "cuda":
        return dataclasses.replace(
            profile,
            # Measured of steps that recompute: they run layer by layer, others from a graph.
            recompute_overhead_s=profile.restore_overhead_s,
            restore_overhead_s=_RESTORE_S,
        )
    return dataclasses.replace(
        profile,
        step_overhead_s=profile.step_overhead_s + _SCHEDULER_STEP_S,
        row_overhead_s=profile.row_overhead_s + _SCHEDULER_ROW_S,
        restore_overhead_s=profile.restore_overhead_s + _RESTORE_S,
        phase_change_s=_SCHEDULER_TURN_S,
    )


def measure_device(device: str | torch.device) -> HardwareProfile:
    """Large matrix products, reads and copies: a first guess, and what the link does."""
    device = torch.device(device)
    a = torch.randn(512, 1024, device=device)
    b = torch.randn(1024, 1024, device=device)
    flops = 2 * 512 * 1024**2 / _best(lambda: a @ b, device)
    buffer = torch.ones(_PROBE_BYTES // 4, device=device)
    read = _PROBE_BYTES / _best(buffer.sum, device)
    host = torch.ones(_PROBE_BYTES // 4, pin_memory=device.type == "cuda")
    copy = _best(_transfer(host, buffer), device)
    small = _best(lambda: buffer[:1024].copy_(host[:1024], non_blocking=True), device)
    return HardwareProfile(
        name=device.type,
        flops=flops,
        device_bytes_per_s=read,
        link_bytes_per_s=_PROBE_BYTES / copy,
        link_latency_s=small,
        step_overhead_s=1e-3,
        row_overhead_s=1e-5,
        attention_flops=flops / 2,
        packing=0.0 if device.type == "cuda" else 0.5,
        overlap=1.0 if device.type == "cuda" else 0.0,
        fetch_share=_DEVICE_FETCH_SHARE if device.type == "cuda" else _FETCH_SHARE,
        # Steps that recompute may go through SGLang's layers, others through captured graphs.
        restore_overhead_s=1e-3,
    )


def _transfer(host: torch.Tensor, buffer: torch.Tensor) -> Callable[[], Any]:
    """A copy of all of `host` to the device, as KV is fetched: where the processor copies, a thread
    does, unit by unit from wherever they are."""
    if buffer.device.type != "cpu":
        return lambda: buffer.copy_(host, non_blocking=True)
    source, target = (t.numpy().reshape(-1, _UNIT_ELEMENTS) for t in (host, buffer))
    order = np.random.default_rng(0).permutation(len(source))
    return lambda: source.take(order, axis=0, out=target, mode="clip")


def _affordable(shape: ModelShape, guess: HardwareProfile, steps: SyntheticSteps) -> Sequence[Mix]:
    """The mixes that fit and would not take too much of the time, at least one; the shortest
    first, so that where time is short each kind has its part. On a CUDA device all that fit: on
    an H100 the longest takes 0.2 s with a 13B model, whatever a guess says that was made beside the
    start of another server, and the first of each kind compiles what serving should not wait for.
    """
    model = RooflineLatencyModel(shape, guess)
    seconds = {mix: float(model.step_seconds(mix.work)) for mix in steps.that_fit(MIXES)}
    shortest_first = sorted(seconds, key=seconds.__getitem__)
    if guess.name == "cuda":
        return shortest_first
    return [m for m in shortest_first if seconds[m] <= _LARGEST_S] or shortest_first[:1]


def _best(action: Callable[[], Any], device: torch.device) -> float:
    """Shortest time of `action` in four runs, in seconds, after one that does not count."""
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
