"""Serves a model in every mode, learns the machine, replays each configuration and predicts it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from ellm_sgl.eval.replay import replay_to_end
from ellm_sgl.eval.simulator import Load, Machine, Settings, simulate
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.eval.simulator.settings import slower
from ellm_sgl.eval.summary import Summary, summarize
from ellm_sgl.eval.traces import FloatArray, Trace
from ellm_sgl.eval.validate.configurations import (
    BURST,
    CHUNK_TOKENS,
    ELLM,
    LAYER_GROUP,
    MAX_RUNNING,
    POOL_TOKENS,
    RECOMPUTE,
    REFERENCE,
    TEACHING,
    Configuration,
    Server,
)
from ellm_sgl.eval.validate.results import MEASURES, Comparison, Validation, mean_of
from ellm_sgl.eval.workloads import to_requests
from ellm_sgl.latency import HardwareProfile, RooflineLatencyModel, StepWork
from ellm_sgl.latency.fit import fit_profile
from ellm_sgl.serve.process import ServerError, ServerProcess, stop_on_signals

Say = Callable[[str], None]
Steps = list[tuple[StepWork, float]]
TEACHING_SEED, OTHER_SEED = 100, 200
BETWEEN = 4
"""Configurations between two runs of the reference load."""
DRAWS = 16
"""Predictions whose mean is one: each meets the machine's unevenness elsewhere."""


@dataclass(frozen=True)
class _Pace:
    """What steps took, in multiples of what the fitted model says of them."""

    slowness: float
    """Of them all: the mean."""
    unevenness: FloatArray
    """Each one's, over the mean."""

    def beginning_at(self, share: float) -> _Pace:
        """The same steps, in turn, but from another one on."""
        skipped = int(share * len(self.unevenness))
        return dataclasses.replace(self, unevenness=np.roll(self.unevenness, -skipped))


@dataclass(frozen=True)
class _Taught:
    """What the machine was found to be, before any configuration was run."""

    machine: Machine
    """As fitted to the steps."""
    calibrated: HardwareProfile
    """What the server took the machine for when it started: its policy's model began with it,"""
    steps: tuple[tuple[StepWork, float], ...]
    """and has learnt from these since."""
    capacity: float
    """Output tokens per second with ample memory."""
    request_s: float
    """Time of a request's way to the scheduler and of a token's way back, that no step explains."""
    reference: Trace
    """A load that was among those learnt from: run again, it tells the machine's speed."""
    latency_model: float
    """MAPE of the fitted latency model over the steps it was fitted to."""
    pace: _Pace
    """Of those steps, in the order in which they ran: it is met by steps of any size."""


@dataclass(frozen=True)
class _Run:
    """One replay of one configuration."""

    configuration: Configuration
    measured: Summary
    steps: Steps


def validate(
    model_path: Path, configurations: Sequence[Configuration], rounds: int, say: Say
) -> Validation:
    """Serve, teach, replay and predict.

    Args:
        rounds: replays of each configuration, the whole list in turn, every other one backwards.

    Raises:
        ServerError: a server did not start, or requests failed.
        ConfigError: the model's configuration cannot be read.
        KeyboardInterrupt: asked to stop; no server is left.
    """
    shape = dataclasses.replace(read_model(model_path / "config.json"), weight_bytes=4, kv_bytes=4)
    with stop_on_signals(), ExitStack() as stack:
        servers: dict[Server, ServerProcess] = {}
        for server in dict.fromkeys([Server(ELLM), *(c.server for c in configurations)]):
            say(f"starting mode {server.mode}")
            process = ServerProcess(server.arguments(model_path), {"OMP_NUM_THREADS": "1"})
            servers[server] = stack.enter_context(process)
        unfitted = Machine(str(model_path), shape, _profile(servers[Server(ELLM)]), POOL_TOKENS,
                           host_tokens=POOL_TOKENS)  # fmt: skip
        taught = _teach(servers[Server(ELLM)], unfitted, say)
        order = [configurations[:: 1 - 2 * (r % 2)] for r in range(rounds)]
        runs, slowness = _run_all(servers, taught, list(chain.from_iterable(order)), say)
    say("predicting")
    of_each = [[r for r in runs if r.configuration == c] for c in configurations]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compared = tuple(pool.map(partial(_compare, taught, slowness), of_each))
    return Validation(
        str(model_path), taught.machine.profile, taught.latency_model, slowness, compared
    )


def _profile(server: ServerProcess) -> HardwareProfile:
    return HardwareProfile(**server.state()["hardware"])


def _teach(server: ServerProcess, unfitted: Machine, say: Say) -> _Taught:
    say("learning the machine: how much it serves")
    _replay(server, REFERENCE, BURST.trace(1.0, OTHER_SEED), OTHER_SEED)  # the first is slow
    burst = _replay(server, REFERENCE, BURST.trace(1.0, TEACHING_SEED), TEACHING_SEED)
    reference = REFERENCE.cell.trace(burst.tokens_per_s, TEACHING_SEED)
    lessons = []
    for configuration in TEACHING:
        say(f"learning the machine: {configuration}")
        trace = configuration.cell.trace(burst.tokens_per_s, TEACHING_SEED)
        lessons.append((_run(server, configuration, trace, TEACHING_SEED), trace))
        lessons.append((_run(server, REFERENCE, reference, TEACHING_SEED), reference))
    steps = [step for run, _ in lessons for step in run.steps]
    profile = fit_profile(unfitted.shape, unfitted.profile, steps)
    machine = dataclasses.replace(unfitted, profile=profile)
    pace = _pace(machine, steps)
    error = float(np.abs(1 / (pace.slowness * pace.unevenness) - 1).mean())
    taught = _Taught(
        machine=machine,
        calibrated=unfitted.profile,
        steps=tuple(steps),
        capacity=burst.tokens_per_s,
        request_s=0.0,
        reference=reference,
        latency_model=error,
        pace=pace,
    )
    # What the simulator leaves out of a TTFT, given how long each step took, is what HTTP takes.
    left_out = [
        run.measured.ttft.mean
        - _simulate(taught, run.configuration, trace, _pace(machine, run.steps)).ttft.mean
        for run, trace in lessons
    ]
    return dataclasses.replace(taught, request_s=statistics.median(left_out))


def _run(server: ServerProcess, configuration: Configuration, trace: Trace, seed: int) -> _Run:
    """Replay; with the steps that it took, and their times."""
    before = server.state()["steps_total"]
    summary = _replay(server, configuration, trace, seed)
    new = server.state()["steps_total"] - before
    fields = [f.name for f in dataclasses.fields(StepWork)]
    steps = [
        (StepWork(**{name: step[name] for name in fields}), step["seconds"])
        for step in server.steps()[-new:]
    ]
    return _Run(configuration, summary, steps)


def _pace(machine: Machine, steps: Steps) -> _Pace:
    model = RooflineLatencyModel(machine.shape, machine.profile)
    slowness = np.array([seconds / float(model.step_seconds(work)) for work, seconds in steps])
    return _Pace(float(slowness.mean()), slowness / slowness.mean())


def _run_all(
    servers: Mapping[Server, ServerProcess],
    taught: _Taught,
    configurations: Sequence[Configuration],
    say: Say,
) -> tuple[list[_Run], float]:
    """Run each, and now and then the reference load, whose steps tell how much slower the machine
    is than when it was learnt. The mean of all counts: one replay's steps and those of the next
    differ by a quarter, and say nothing of each other (docs/evaluation.md)."""

    def slowness() -> float:
        run = _run(servers[Server(ELLM)], REFERENCE, taught.reference, TEACHING_SEED)
        return _pace(taught.machine, run.steps).slowness

    found = [slowness()]
    runs = []
    for number, configuration in enumerate(configurations, 1):
        say(str(configuration))
        trace = configuration.cell.trace(taught.capacity, seed=0)
        runs.append(_run(servers[configuration.server], configuration, trace, seed=0))
        if number % BETWEEN == 0:
            found.append(slowness())
    return runs, statistics.fmean(found)


def _compare(taught: _Taught, slowness: float, runs: Sequence[_Run]) -> Comparison:
    """All replays of one configuration, what was to be expected of it at the machine's slowness,
    and what is to be expected knowing how long each of the replays' steps took."""
    configuration = runs[0].configuration
    pace = dataclasses.replace(taught.pace, slowness=slowness)
    expected = [pace.beginning_at(draw / DRAWS) for draw in range(DRAWS)]
    own = [_pace(taught.machine, run.steps) for run in runs]
    return Comparison(
        configuration,
        [_measures(run.measured) for run in runs],
        mean_of([_predict(taught, configuration, pace) for pace in expected]),
        mean_of([_predict(taught, configuration, pace) for pace in own]),
    )


def _measures(summary: Summary) -> dict[str, float]:
    return {name: value(summary) for name, value in MEASURES.items()}


def _predict(taught: _Taught, configuration: Configuration, pace: _Pace) -> dict[str, float]:
    trace = configuration.cell.trace(taught.capacity, seed=0)
    found = _measures(_simulate(taught, configuration, trace, pace))
    return found | {"ttft": found["ttft"] + taught.request_s * pace.slowness}


def _replay(
    server: ServerProcess, configuration: Configuration, trace: Trace, seed: int
) -> Summary:
    """A replay against the server in this configuration."""
    server.flush_cache()
    if configuration.mode == ELLM:
        server.switch_policy(configuration.policy, **configuration.options)
    if configuration.mode != RECOMPUTE:
        server.adjust(ellm_device_kv_tokens=configuration.cell.device_tokens)
    summary = summarize(replay_to_end(server.url, to_requests(trace, seed)))
    if not server.alive() or summary.failed:
        raise ServerError(
            f"{configuration}: {summary.failed} of {summary.requests} requests failed\n"
            f"{server.last_words()}"
        )
    return summary


def _simulate(taught: _Taught, configuration: Configuration, trace: Trace, pace: _Pace) -> Summary:
    """What the simulator says of these requests."""
    settings = Settings(
        mode=configuration.mode,
        policy=configuration.policy,
        policy_options=configuration.options,
        layer_group=LAYER_GROUP,
        max_running=MAX_RUNNING,
        chunk_tokens=CHUNK_TOKENS,
        late_results=True,
        unevenness=tuple(pace.unevenness.tolist()),
        calibrated=taught.calibrated,
        experience=taught.steps,
        stride=1,
    )
    machine = taught.machine.limited(configuration.cell.device_tokens, None)
    machine = dataclasses.replace(machine, profile=slower(machine.profile, pace.slowness))
    return simulate(machine, settings, Load.of(trace)).summary
