"""Serves a model in every mode, learns the machine, replays each configuration and predicts it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
AROUND = 2
"""Runs of the reference load before a configuration, and after it, that its slowness is from."""
DRAWS = 4
"""Predictions whose mean is one: each meets the machine's unevenness elsewhere."""


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
    unevenness: FloatArray
    """What those steps took, in the order in which they ran, in multiples of what the model says
    of them and of the mean of that: it is met by steps of any size."""


@dataclass(frozen=True)
class _Run:
    """One replay of one configuration."""

    configuration: Configuration
    measured: Summary
    slowness: float
    """Of the reference load around it."""
    own_slowness: float
    """Of its own steps."""


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
        runs = _run_all(servers, taught, list(chain.from_iterable(order)), say)
    say("predicting")
    compared = tuple(
        _compare(taught, [r for r in runs if r.configuration == c]) for c in configurations
    )
    return Validation(str(model_path), taught.machine.profile, taught.latency_model, compared)


def _profile(server: ServerProcess) -> HardwareProfile:
    return HardwareProfile(**server.state()["hardware"])


def _teach(server: ServerProcess, unfitted: Machine, say: Say) -> _Taught:
    say("learning the machine: how much it serves")
    _replay(server, REFERENCE, BURST.trace(1.0, OTHER_SEED), OTHER_SEED)  # the first is slow
    burst = _replay(server, REFERENCE, BURST.trace(1.0, TEACHING_SEED), TEACHING_SEED)
    reference = REFERENCE.cell.trace(burst.tokens_per_s, TEACHING_SEED)
    steps: Steps = []
    ttfts = []
    for configuration in TEACHING:
        say(f"learning the machine: {configuration}")
        trace = configuration.cell.trace(burst.tokens_per_s, TEACHING_SEED)
        steps += _steps_of(server, configuration, trace, TEACHING_SEED)[0]
        of_reference, replayed = _steps_of(server, REFERENCE, reference, TEACHING_SEED)
        steps += of_reference
        ttfts.append(replayed.ttft.mean)
    profile = fit_profile(unfitted.shape, unfitted.profile, steps)
    machine = dataclasses.replace(unfitted, profile=profile)
    model = RooflineLatencyModel(machine.shape, profile)
    seconds = np.array([s for _, s in steps])
    predicted = np.array([float(model.step_seconds(w)) for w, _ in steps])
    error = float(np.abs(predicted / seconds - 1).mean())
    unevenness = seconds / predicted
    unevenness /= unevenness.mean()
    taught = _Taught(
        machine=machine,
        calibrated=unfitted.profile,
        steps=tuple(steps),
        capacity=burst.tokens_per_s,
        request_s=0.0,
        reference=reference,
        latency_model=error,
        unevenness=unevenness,
    )
    # With memory for all, what the simulator leaves out of a TTFT is what HTTP takes.
    request_s = statistics.fmean(ttfts) - _simulate(taught, REFERENCE, reference).ttft.mean
    return dataclasses.replace(taught, request_s=request_s)


def _steps_of(
    server: ServerProcess, configuration: Configuration, trace: Trace, seed: int
) -> tuple[Steps, Summary]:
    """Replay, and return the steps that it took, with their times."""
    before = server.state()["steps_total"]
    summary = _replay(server, configuration, trace, seed)
    new = server.state()["steps_total"] - before
    fields = [f.name for f in dataclasses.fields(StepWork)]
    steps = [
        (StepWork(**{name: step[name] for name in fields}), step["seconds"])
        for step in server.steps()[-new:]
    ]
    return steps, summary


def _slowness(
    server: ServerProcess, configuration: Configuration, taught: _Taught, trace: Trace, seed: int
) -> tuple[float, Summary]:
    """How much longer the load's steps take than the model says that was fitted to the machine
    when it was learnt; and the replay."""
    steps, summary = _steps_of(server, configuration, trace, seed)
    model = RooflineLatencyModel(taught.machine.shape, taught.machine.profile)
    predicted = sum(float(model.step_seconds(w)) for w, _ in steps)
    return sum(s for _, s in steps) / predicted, summary


def _run_all(
    servers: Mapping[Server, ServerProcess],
    taught: _Taught,
    configurations: Sequence[Configuration],
    say: Say,
) -> list[_Run]:
    """Run each, with the reference load between them; each one's slowness is the mean of the
    runs of that load around it: the speed of a shared machine drifts by a fifth within minutes,
    and two runs of one load one after the other differ by some hundredths."""

    def of_reference() -> float:
        server = servers[Server(ELLM)]
        return _slowness(server, REFERENCE, taught, taught.reference, TEACHING_SEED)[0]

    slowness = [of_reference()]
    replays = []
    for configuration in configurations:
        say(str(configuration))
        trace = configuration.cell.trace(taught.capacity, seed=0)
        server = servers[configuration.server]
        replays.append(_slowness(server, configuration, taught, trace, seed=0))
        slowness.append(of_reference())
    return [
        _Run(
            configuration,
            measured,
            slowness=statistics.fmean(slowness[max(i + 1 - AROUND, 0) : i + 1 + AROUND]),
            own_slowness=own,
        )
        for i, (configuration, (own, measured)) in enumerate(
            zip(configurations, replays, strict=True)
        )
    ]


def _compare(taught: _Taught, runs: Sequence[_Run]) -> Comparison:
    """All replays of one configuration beside their predictions."""
    return Comparison(
        runs[0].configuration,
        statistics.fmean(r.slowness for r in runs),
        [{name: value(r.measured) for name, value in MEASURES.items()} for r in runs],
        mean_of([_predict(taught, r.configuration, r.slowness) for r in runs]),
        mean_of([_predict(taught, r.configuration, r.own_slowness) for r in runs]),
    )


def _predict(taught: _Taught, configuration: Configuration, slowness: float) -> dict[str, float]:
    """The mean of several predictions, which begin evenly spaced in the machine's unevenness."""
    trace = configuration.cell.trace(taught.capacity, seed=0)
    found = []
    for draw in range(DRAWS):
        begin = draw * len(taught.unevenness) // DRAWS
        summary = _simulate(taught, configuration, trace, slowness, begin)
        found.append({name: value(summary) for name, value in MEASURES.items()})
    mean = mean_of(found)
    return mean | {"ttft": mean["ttft"] + taught.request_s * slowness}


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


def _simulate(
    taught: _Taught,
    configuration: Configuration,
    trace: Trace,
    slowness: float = 1.0,
    begin: int = 0,
) -> Summary:
    """What the simulator says of these requests. `begin`: where it meets the unevenness first."""
    settings = Settings(
        mode=configuration.mode,
        policy=configuration.policy,
        policy_options=configuration.options,
        layer_group=LAYER_GROUP,
        max_running=MAX_RUNNING,
        chunk_tokens=CHUNK_TOKENS,
        late_results=True,
        unevenness=tuple(np.roll(taught.unevenness, -begin).tolist()),
        calibrated=taught.calibrated,
        experience=taught.steps,
        stride=1,
    )
    machine = taught.machine.limited(configuration.cell.device_tokens, None)
    machine = dataclasses.replace(machine, profile=slower(machine.profile, slowness))
    return simulate(machine, settings, Load.of(trace)).summary
