"""`ellm-sgl calibrate`: what the machine sustains, and how well each latency model predicts it.

A server calibrates itself as it starts; then it gets loads of many shapes, and every step it ran
is compared with what the models said of it. What the machine itself leaves open is told beside
them: decode steps of the same requests, one after the other, do not take the same time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import click
import httpx
import numpy as np
from rich import box
from rich.table import Table

from ellm_sgl.client.process import DEMO_MODEL, ServerError, ServerProcess, stop_on_signals
from ellm_sgl.config.commands import (
    answer,
    json_flag,
    model_path_option,
    plain_table,
    progress_lines,
    told_in_a_line,
)
from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel, StepWork

OUTPUT_TOKENS = 12
LEARNING_STEPS = 200
"""Steps that the online model may learn from before its error counts."""
BESIDE = 4
"""Steps before and after a step that it is compared with, where they are equal to it."""
_POOL_TOKENS = 32_768
_LONGEST_STEP_S = 0.5
"""Loads whose steps would take longer by the profile are left out."""
_WORK_FIELDS = tuple(field.name for field in dataclasses.fields(StepWork))

Step = dict[str, float]
"""One record of `GET /ellm/steps`."""


@dataclass(frozen=True)
class Load:
    """Requests sent at once."""

    requests: int
    tokens: int
    """Prompt tokens, on average; each request's own number is 0.6 to 1.4 times this."""
    ratio: float
    """Uncached ratio r."""

    @property
    def work(self) -> StepWork:
        """A decoding step of it, about."""
        span = self.tokens * self.ratio
        return StepWork(
            decode_rows=self.requests,
            decode_tokens=self.requests * self.tokens,
            restored_tokens=self.requests * span,
            restored_squares=self.requests * span**2,
        )


LOADS = tuple(
    Load(b, s, r)
    for b, s, r in itertools.product((1, 2, 4, 8, 16), (64, 256, 800), (0.0, 0.25, 0.5))
)


@dataclass(frozen=True)
class ModelError:
    """How far a latency model was off."""

    model: str
    steps: int
    """Steps compared."""
    mape: float
    """Mean of |predicted - measured| / measured."""
    median_ape: float
    """Its median, which steps that some other process interrupted do not raise."""


@dataclass(frozen=True)
class CalibrationReport:
    """What `ellm-sgl calibrate` found."""

    model_path: str
    shape: ModelShape
    hardware: HardwareProfile
    errors: tuple[ModelError, ...]
    step_noise: tuple[ModelError, ...]
    """See `step_noise`."""


def measure(model_path: str | None, dtype: str) -> CalibrationReport:
    """Start a server on one rank, let it calibrate, load it, and compare. One to three minutes.

    Args:
        model_path: a local model; None for the demo model.
        dtype: of weights and KV.

    Raises:
        ServerError: the server did not start.
    """
    from ellm_sgl.sglang.calibration import shape_of
    from ellm_sgl.sglang.platform.torchvision_ops import declare

    declare()
    path = model_path or str(DEMO_MODEL)
    shape = shape_of(path, dtype)
    arguments = ["--model-path", path, "--dtype", dtype, "--skip-tokenizer-init"]
    arguments += ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", str(_POOL_TOKENS)]
    progress_lines("starting a server, which calibrates itself")
    with stop_on_signals(), ServerProcess(arguments) as server:
        hardware = HardwareProfile(**server.state()["hardware"])
        start_up = len(server.steps())
        rng = random.Random(0)
        loads = _affordable(shape, hardware)
        if not loads:
            raise ServerError(f"no load has steps of {_LONGEST_STEP_S:g} s here: too large a model")
        rng.shuffle(loads)
        for number, load in enumerate(loads, 1):
            shape_of_load = f"b = {load.requests}, s = {load.tokens}, r = {load.ratio}"
            progress_lines(f"load {number} of {len(loads)}: {shape_of_load}")
            server.adjust(ellm_ratio=load.ratio)
            asyncio.run(_send(server.url, _prompts(load, shape.vocabulary, rng)))
        steps = server.steps()
    errors = compare(shape, hardware, steps, start_up)
    noise = step_noise(steps, start_up + LEARNING_STEPS)
    return CalibrationReport(path, shape, hardware, errors, noise)


def compare(
    shape: ModelShape, hardware: HardwareProfile, steps: Sequence[Step], start_up: int
) -> tuple[ModelError, ...]:
    """Errors of each model of a server that started with the profile `hardware`, in all its
    `steps` but those of `start_up`; of the one that learns, if there were steps enough for that."""
    served, learnt = steps[start_up:], steps[start_up + LEARNING_STEPS :]
    works = [StepWork(**{name: s[name] for name in _WORK_FIELDS}) for s in served]
    model = RooflineLatencyModel(shape, hardware)
    by_profile = [float(model.step_seconds(w)) for w in works]
    on_line = [s["predicted_s"] for s in learnt]
    online = [_error(f"online, after {LEARNING_STEPS} steps", on_line, learnt)] if learnt else []
    return (
        _error("calibrated profile", by_profile, served),
        *online,
        _error("paper, Eq. (4)", [s["paper_s"] for s in served], served),
    )


def step_noise(steps: Sequence[Step], first: int) -> tuple[ModelError, ...]:
    """What the machine leaves open: decode steps, each compared with the median of the equal ones
    next to it, up to `BESIDE` before it and as many after it, at least `BESIDE` in all. An
    online model knows none of those after it.

    Returns:
        Errors of the online model and of the steps beside, over the same steps, from `first` on;
        none if there are no such steps.
    """
    kinds = [
        (s["decode_rows"], s["restored_tokens"], s["prefill_rows"], s["phase_changes"])
        for s in steps
    ]
    compared, beside = [], []
    for i in range(first, len(steps)):
        before, after = range(i - 1, -1, -1), range(i + 1, len(steps))
        equal = [*_equal(kinds, i, before), *_equal(kinds, i, after)]
        if steps[i]["decode_rows"] and len(equal) >= BESIDE:
            compared.append(steps[i])
            beside.append(float(np.median([steps[j]["seconds"] for j in equal])))
    if not compared:
        return ()
    return (
        _error("online, equal steps in a row", [s["predicted_s"] for s in compared], compared),
        _error("median of the steps beside each", beside, compared),
    )


def _equal(kinds: Sequence[tuple[float, ...]], at: int, places: range) -> Iterator[int]:
    """The first of `places` (at most `BESIDE`) that are of the kind of `at`."""
    return takewhile(lambda place: kinds[place] == kinds[at], places[:BESIDE])


def _error(name: str, predicted: Sequence[float], steps: Sequence[Step]) -> ModelError:
    measured = np.array([s["seconds"] for s in steps])
    ape = np.abs(np.array(predicted) / measured - 1)
    return ModelError(name, len(ape), float(ape.mean()), float(np.median(ape)))


def _affordable(shape: ModelShape, hardware: HardwareProfile) -> list[Load]:
    model = RooflineLatencyModel(shape, hardware)
    return [x for x in LOADS if model.step_seconds(x.work) <= _LONGEST_STEP_S]


def _prompts(load: Load, vocabulary: int, rng: random.Random) -> list[list[int]]:
    lengths = [max(1, int(load.tokens * rng.uniform(0.6, 1.4))) for _ in range(load.requests)]
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


async def _send(url: str, prompts: Sequence[Sequence[int]]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=900, trust_env=False) as client:
        bodies = [{"input_ids": p, "sampling_params": sampling} for p in prompts]
        answers = (client.post(f"{url}/generate", json=body) for body in bodies)
        for answer in await asyncio.gather(*answers):
            answer.raise_for_status()


@click.command()
@model_path_option
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@json_flag
def calibrate(model_path: str | None, dtype: str, as_json: bool) -> None:
    """Measure this machine as a server does at start-up, and check the latency models against
    steps of many batch sizes, lengths and uncached ratios.
    """
    with told_in_a_line(ServerError, OSError):
        report = measure(model_path, dtype)
    found = _profile_table(report.hardware), _error_table(report)
    answer(as_json, dataclasses.asdict(report), *found)


def _profile_table(hardware: HardwareProfile) -> Table:
    table = Table("hardware profile", "", box=box.SIMPLE, pad_edge=False)
    for name, value in dataclasses.asdict(hardware).items():
        table.add_row(name, value if isinstance(value, str) else f"{value:.3g}")
    return table


def _error_table(report: CalibrationReport) -> Table:
    figures = ("steps", "mean error", "median error")
    table = plain_table("latency model", figures, title=report.model_path)
    for e in (*report.errors, *report.step_noise):
        table.add_row(e.model, str(e.steps), f"{e.mape:.1%}", f"{e.median_ape:.1%}")
    return table
