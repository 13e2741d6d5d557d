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

from ellm_sgl.client.process import ServerError, ServerProcess, stop_on_signals
from ellm_sgl.client.replay import replay_to_end
from ellm_sgl.client.summary import Summary, summarize
from ellm_sgl.client.traces import FloatArray, Trace
from ellm_sgl.client.workloads import to_requests
from ellm_sgl.eval.simulator import Load, Machine, Settings, simulate
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.eval.simulator.settings import slower
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
from ellm_sgl.latency import HardwareProfile, RooflineLatencyModel, StepWork
from ellm_sgl.latency.fit import fit_profile

Say = Callable[[str], None]
Steps = Sequence[tuple[StepWork, float]]
TEACHING_SEED, OTHER_SEED = 100, 200
BETWEEN = 4
"""Configurations between two runs of the reference load."""
DRAWS = 16
"""Predictions whose mean is one: each meets the noise of the machine's steps elsewhere."""


@dataclass(frozen=True)
class _Pace:
    """What steps took, in multiples of what the model says that was fitted to the machine."""

    slowdown: float
    """Of them all: the mean."""
    step_noise: FloatArray
    """Each one's, over the mean."""

    def beginning_at(self, share: float) -> _Pace:
        """The same steps in the same order, but from another one on, and around.

        Args:
            share: of the steps that then come last.
        """
        skipped = int(share * len(self.step_noise))
        return dataclasses.replace(self, step_noise=np.roll(self.step_noise, -skipped))


@dataclass(frozen=True)
class _Taught:
    """What the machine was found to be, before any configuration was run."""

    machine: Machine
    """As fitted to the steps."""
    calibrated: HardwareProfile
    """What the server took the machine for when it started: its policy's model began with it,"""
    steps: Steps
    """and had learnt from these when the configurations began."""
    capacity: float
    """Output tokens per second with ample memory."""
    request_s: float
    """Time of a request's way to the scheduler and of a token's way back, that no step explains."""


@dataclass(frozen=True)
class _Run:
    """One replay of one configuration."""

    configuration: Configuration
    trace: Trace
    measured: Summary
    steps: Steps
    observed_steps: Steps
    """What the policy's model had learnt from before, since the machine was learnt, too."""


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
        teacher = servers[Server(ELLM)]
        profile = HardwareProfile(**teacher.state()["hardware"])
        unfitted = Machine(str(model_path), shape, profile, POOL_TOKENS, host_tokens=POOL_TOKENS)
        taught = _teach(teacher, unfitted, say)
        order = [configurations[:: 1 - 2 * (r % 2)] for r in range(rounds)]
        runs, slownesses = _run_all(servers, taught, list(chain.from_iterable(order)), say)
    say("predicting")
    of_each = [[r for r in runs if r.configuration == c] for c in configurations]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        slowdown = statistics.fmean(slownesses)
        compared = tuple(pool.map(partial(_compare, taught, slowdown), of_each))
    pace = _pace(taught.machine, taught.steps)
    return Validation(
        model_path=str(model_path),
        hardware=taught.machine.profile,
        latency_model=float(np.abs(1 / (pace.slowdown * pace.step_noise) - 1).mean()),
        request_s=taught.request_s,
        slownesses=slownesses,
        comparisons=compared,
    )


def _teach(server: ServerProcess, unfitted: Machine, say: Say) -> _Taught:
    say("learning the machine: how much it serves")
    for seed in (OTHER_SEED, TEACHING_SEED):  # the first is slow
        burst = _replay(server, BURST, BURST.cell.trace(1.0, seed), seed)
    capacity = burst.tokens_per_s
    lessons: list[_Run] = []
    steps: list[tuple[StepWork, float]] = []
    for configuration in TEACHING:
        say(f"learning the machine: {configuration}")
        for lesson in (configuration, REFERENCE):
            lessons.append(_run(server, lesson, capacity, TEACHING_SEED, tuple(steps)))
            steps += lessons[-1].steps
    profile = fit_profile(unfitted.shape, unfitted.profile, steps)
    machine = dataclasses.replace(unfitted, profile=profile)
    taught = _Taught(machine, unfitted.profile, steps, capacity, request_s=0.0)
    # What the simulator leaves out of a TTFT, given how long each step took, is what HTTP takes.
    left_out = []
    for run in lessons:
        pace = _pace(machine, run.steps)
        simulated = _simulate(taught, run, pace)
        left_out.append((run.measured.ttft.mean - simulated.ttft.mean) / pace.slowdown)
    # The median: where requests queue, one that joins a step later than simulated is no HTTP.
    return dataclasses.replace(taught, request_s=statistics.median(left_out))


def _run(
    server: ServerProcess,
    configuration: Configuration,
    capacity: float,
    seed: int,
    observed_steps: Steps,
) -> _Run:
    """Replay; with the steps that it took, and their times.

    Raises:
        ServerError: requests failed, or the server has not kept all of the steps.
    """
    trace = configuration.cell.trace(capacity, seed)
    before = server.state()["steps_total"]
    summary = _replay(server, configuration, trace, seed)
    new = server.state()["steps_total"] - before
    fields = [f.name for f in dataclasses.fields(StepWork)]
    steps = [
        (StepWork(**{name: step[name] for name in fields}), step["seconds"])
        for step in server.steps()[-new:]
    ]
    if len(steps) != new:
        raise ServerError(f"{configuration}: of {new} steps the server has kept {len(steps)}")
    return _Run(configuration, trace, summary, steps, observed_steps)


def _pace(machine: Machine, steps: Steps) -> _Pace:
    model = RooflineLatencyModel(machine.shape, machine.profile)
    slowdown = np.array([seconds / float(model.step_seconds(work)) for work, seconds in steps])
    return _Pace(float(slowdown.mean()), slowdown / slowdown.mean())


def _run_all(
    servers: Mapping[Server, ServerProcess],
    taught: _Taught,
    configurations: Sequence[Configuration],
    say: Say,
) -> tuple[list[_Run], list[float]]:
    """Run each, and now and then the reference load, whose steps tell how slow the machine is by
    then. The mean of all of them counts: the steps of one replay and those of the next differ by a
    quarter, and say nothing of each other (docs/evaluation.md)."""
    learnt = list(taught.steps)

    def run(configuration: Configuration, seed: int) -> _Run:
        server = servers[configuration.server]
        done = _run(server, configuration, taught.capacity, seed, tuple(learnt))
        if configuration.mode == ELLM:
            learnt.extend(done.steps)
        return done

    def slowdown() -> float:
        return _pace(taught.machine, run(REFERENCE, TEACHING_SEED).steps).slowdown

    slownesses = [slowdown()]
    runs = []
    for number, configuration in enumerate(configurations, 1):
        say(str(configuration))
        runs.append(run(configuration, seed=0))
        if number % BETWEEN == 0:
            slownesses.append(slowdown())
    return runs, slownesses


def _compare(taught: _Taught, slowdown: float, runs: Sequence[_Run]) -> Comparison:
    """All replays of one configuration, what was to be expected of it at the machine's slowdown,
    and what is to be expected of each replay knowing how long its steps took."""
    # The fitted steps' pace, in the order in which they ran: it is met by steps of any size.
    pace = dataclasses.replace(_pace(taught.machine, taught.steps), slowdown=slowdown)
    expected = [
        _predict(taught, runs[draw % len(runs)], pace.beginning_at(draw / DRAWS))
        for draw in range(DRAWS)
    ]
    return Comparison(
        runs[0].configuration,
        [_measures(run.measured) for run in runs],
        mean_of(expected),
        [_predict(taught, run, _pace(taught.machine, run.steps)) for run in runs],
    )


def _measures(summary: Summary) -> dict[str, float]:
    return {name: value(summary) for name, value in MEASURES.items()}


def _predict(taught: _Taught, run: _Run, pace: _Pace) -> dict[str, float]:
    found = _measures(_simulate(taught, run, pace))
    return found | {"ttft": found["ttft"] + taught.request_s * pace.slowdown}


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


def _simulate(taught: _Taught, run: _Run, pace: _Pace) -> Summary:
    """What the simulator says of the requests of a replay, were steps of this pace."""
    configuration = run.configuration
    settings = Settings(
        mode=configuration.mode,
        policy=configuration.policy,
        policy_options=configuration.options,
        layer_group=LAYER_GROUP,
        max_running=MAX_RUNNING,
        chunk_tokens=CHUNK_TOKENS,
        late_results=True,
        step_noise=tuple(pace.step_noise.tolist()),
        calibrated=taught.calibrated,
        observed_steps=tuple(run.observed_steps),
        stride=1,
    )
    machine = taught.machine.limited(configuration.cell.device_tokens, None)
    machine = dataclasses.replace(machine, profile=slower(machine.profile, pace.slowdown))
    return simulate(machine, settings, Load.of(run.trace)).summary
