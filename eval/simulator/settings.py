"""Settings of a simulated server, and the parts that they lead to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ellm_sgl import latency
from ellm_sgl.config import LATENCY_MODELS, ConfigError
from ellm_sgl.config.ranges import TOKENS, Range, shown
from ellm_sgl.engine import Controller, ServerLimits, StepLog
from ellm_sgl.engine.answers import Answers
from ellm_sgl.engine.host_buffer import HostBuffer
from ellm_sgl.eval.simulator.admission import (
    Admission,
    MixedAdmission,
    PaperAdmission,
    SglangAdmission,
    VllmAdmission,
)
from ellm_sgl.eval.simulator.balloon import Balloon, BalloonAdmission, Prefilled
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.eval.simulator.load import Load, Progress, VirtualClock
from ellm_sgl.eval.simulator.machines import Machine
from ellm_sgl.eval.simulator.modes import HostStore, Mode
from ellm_sgl.eval.simulator.restoring import (
    RESTORATIONS,
    RestoringModel,
    fetch_seconds,
    hcache_seconds,
    hcache_size,
)
from ellm_sgl.latency import HardwareProfile, LatencyModel, RooflineLatencyModel, StepWork
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.policies.lengths import Seen
from ellm_sgl.policies.registry import create

MODES = ("ellm", "recompute", "swap", "hcache")
ADMISSIONS = ("sglang", "vllm", "paper")
LEAST_RESTORED = 16_384
"""SGLang's --max-prefill-tokens: a step may always recompute so many tokens."""
FACTOR = Range(0, 10**6, low_open=True)
FACTOR_OR_NOTHING = Range(0, 10**6)
MODEL_ERROR = Range(-1, 10**6, low_open=True)
MOST_UNITS = 2 * 10**8
"""Of a page table: it takes some 12 bytes of this machine's memory for each."""


@dataclass(frozen=True)
class Settings:
    """One simulated server."""

    mode: str = "ellm"
    """One of `MODES`."""
    policy: str = "fcfs"
    """Asked in mode ellm."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    restore: str = "both"
    """How mode ellm brings missing KV back: a key of `RESTORATIONS`."""
    fused: bool = True
    """Restored rows share one pass through the model with those that decode."""
    overlapped: bool = True
    """Transfers run beside the computing."""
    latency_model: str = "roofline"
    """What the device does: "roofline", or "paper", the paper's Eqs. (2)-(4)."""
    model_error: float = 0.0
    """Relative error of the latency model that the policy sees: it expects a step to take
    (1 + error) times what it takes in this respect: 0.2 of compute and memory bandwidth."""
    tpot_slo_s: float = math.inf
    """The server's."""
    block_tokens: int = 16
    layer_group: int = 4
    """F, of mode ellm. The baselines keep all layers of a block together."""
    max_running: int = 256
    chunk_tokens: int = 8192
    admission: str = "sglang"
    """How the baselines admit requests: one of `ADMISSIONS`; see `admission`. Mode ellm is a plugin
    of SGLang, whose admission it keeps."""
    conservativeness: float = 1.0
    """SGLang's --schedule-conservativeness."""
    late_results: bool = False
    """Tokens come out a step late, as from a server whose scheduler waits while a step computes
    (a CPU): see `Record.one_step_late`."""
    step_noise: tuple[float, ...] = ()
    """What successive steps take, in multiples of the latency model's time, over and over: as
    measured. The policy's model then learns from such steps, as a server's does (with a stride of
    1). Empty: steps take what the model says, and the policy knows it."""
    calibrated: HardwareProfile | None = None
    """What the policy's model begins with where it learns: a server's own calibration at start-up.
    None: the device's."""
    observed_steps: tuple[tuple[StepWork, float], ...] = ()
    """Steps, and their seconds, that the policy's model has learnt from before."""
    lengths: Seen | None = None
    """Of answers: what the server knows of them instead of learning from those that end."""
    host_scaling: bool = False
    """As the server's --ellm-host-scaling."""
    activation_tokens: float = 0.0
    """Of baselines that admit as vLLM: tokens of KV whose memory a prompt's row takes while it is
    computed, out of the pool, as `balloon` has it (in mode swap with host memory for prompts). 0:
    activations have memory of their own."""
    mixed_chunks: bool = False
    """Likewise: a chunk of a prompt shares its step with those that decode."""
    prefilled: bool = False
    """Likewise, in mode swap: prompts are computed elsewhere, and their KV is fetched."""
    stride: int = 8
    """Decode steps that one decision is good for, at most. 1 is what a server does; more is
    faster, and less exact: see `engine`."""

    def __post_init__(self) -> None:
        choices = {
            "mode": MODES,
            "restore": tuple(RESTORATIONS),
            "latency_model": LATENCY_MODELS,
            "admission": ADMISSIONS,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r}: give one of {', '.join(known)}")
        if self.mode == "ellm" and self.admission != "sglang":
            raise ConfigError(
                f"admission {self.admission!r}: mode ellm is a plugin of SGLang and admits as it; "
                "give sglang, or another mode"
            )
        self._check_vllms()
        counts = ("block_tokens", "layer_group", "max_running", "chunk_tokens", "stride")
        ranges = dict.fromkeys(counts, TOKENS)
        ranges |= {"conservativeness": FACTOR, "model_error": MODEL_ERROR}
        for name, allowed in ranges.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} {shown(getattr(self, name))}: give {allowed}")
        if not self.tpot_slo_s > 0:
            raise ConfigError(f"tpot_slo_s {self.tpot_slo_s}: give seconds above 0, or none")
        if self.chunk_tokens < self.block_tokens:
            raise ConfigError(f"chunk_tokens {self.chunk_tokens}: less than one block")
        if not all(0 < factor < math.inf for factor in self.step_noise):
            raise ConfigError("step_noise: every factor must be a number above 0")
        if self.step_noise and self.stride != 1:
            raise ConfigError(f"stride {self.stride}: uneven steps are learnt from one by one; 1")
        if self.step_noise and self.latency_model != "roofline":
            raise ConfigError(f"step_noise: the model {self.latency_model} does not learn")
        if (self.calibrated or self.observed_steps) and not self.step_noise:
            raise ConfigError(
                "calibrated, observed_steps: only a model that meets step_noise learns"
            )

    def _check_vllms(self) -> None:
        """What only a server that admits as vLLM can do."""
        FACTOR_OR_NOTHING.check("activation_tokens", self.activation_tokens)
        asked = [n for n in ("activation_tokens", "mixed_chunks", "prefilled") if getattr(self, n)]
        if asked and (self.mode == "ellm" or self.admission != "vllm"):
            raise ConfigError(f"{', '.join(asked)}: for baselines with admission vllm")
        if len(asked) > 1:
            raise ConfigError(f"{', '.join(asked)}: give one of them")
        if self.prefilled and self.mode != "swap":
            raise ConfigError(f"prefilled, mode {self.mode}: KV is fetched in mode swap")


def policy_model(machine: Machine, settings: Settings) -> LatencyModel:
    """What the policy is told of a step: what it takes, or what a server would have learnt."""
    if settings.step_noise:
        profile = settings.calibrated or machine.profile
        model = RooflineLatencyModel(machine.shape, slower(profile, 1 + settings.model_error))
        for work, seconds in settings.observed_steps:
            model.observe(work, seconds)
        return model
    return device_model(machine, settings, settings.model_error)


def device_model(machine: Machine, settings: Settings, error: float = 0.0) -> RestoringModel:
    """What a step takes on the machine.

    Args:
        error: make it wrong by this share: every rate is divided by 1 + error.
    """
    profile = slower(machine.profile, 1 + error)
    inner = latency.BY_NAME[settings.latency_model](machine.shape, profile)
    shares = RESTORATIONS[settings.restore]
    return RestoringModel(inner, machine, shares, settings.fused, settings.overlapped)


def build_mode(
    machine: Machine, settings: Settings, load: Load, progress: Progress, clock: VirtualClock
) -> Mode:
    """Page table, memory and control loop of a server.

    Raises:
        ConfigError: as `registry.create`; the page table would be empty, or too large.
    """
    block, elastic = settings.block_tokens, settings.mode == "ellm"
    layers = machine.shape.layers
    pool = PoolShape(layers, min(settings.layer_group, layers) if elastic else layers, block)
    device_blocks = machine.kv_tokens // block
    if device_blocks < 1:
        raise ConfigError(f"{machine.kv_tokens} KV tokens are less than one block of {block}")
    longest = int((load.prompt_tokens + load.output_tokens).max(initial=1))
    max_restored = max(longest, LEAST_RESTORED)
    blocks, host_blocks = device_blocks, 0
    if elastic:
        host = None if settings.restore == "recompute" else machine.host_tokens
        logical = max(
            machine.kv_tokens + (host or 0) + max_restored + settings.max_running * block,
            4 * machine.kv_tokens + 2 * longest,
        )
        blocks = -(-logical // block)
        if settings.restore != "recompute":
            host_blocks = blocks if host is None else host // block
    units = blocks * pool.num_groups
    if units > MOST_UNITS:
        raise ConfigError(
            f"{machine.name}: {machine.kv_tokens:,} KV tokens, and those of host memory, lead to a "
            f"page table of {units:,} units, more than {MOST_UNITS:,}; give fewer --kv-tokens or "
            "--host-tokens"
        )
    host_units = host_blocks * pool.num_groups
    table = PageTable(pool, blocks, device_blocks * pool.num_groups, host_units)
    if not elastic:
        return _whole_requests(machine, settings, table, load, progress, clock)
    controller = Controller(
        create(settings.policy, settings.policy_options),
        math.inf,
        StepLog(policy_model(machine, settings), clock),
        ServerLimits(
            machine.shape,
            settings.calibrated or machine.profile,
            settings.max_running,
            settings.tpot_slo_s,
            max_restored,
            settings.host_scaling,
        ),
    )
    built = Elastic(table, load, progress, controller, max_restored, clock)
    if settings.lengths is not None:
        built.iteration.requests.answers = Taught(settings.lengths)
    return built


def _whole_requests(
    machine: Machine,
    settings: Settings,
    table: PageTable,
    load: Load,
    progress: Progress,
    clock: VirtualClock,
) -> Mode:
    """A baseline's memory."""
    host = _host_store(machine, settings.mode)
    if settings.prefilled:
        return Prefilled(table, load, progress, host)
    if settings.activation_tokens:
        buffer = HostBuffer(settings.tpot_slo_s) if settings.host_scaling else None
        each = settings.activation_tokens
        return Balloon(table, load, progress, clock, host, each, buffer)
    return Mode(table, load, progress, host)


class Taught(Answers):
    """Lengths learnt elsewhere; what ends here teaches nothing."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def ended(self, tokens: int, priority: int, cut_off: bool) -> None: ...


def _host_store(machine: Machine, mode: str) -> HostStore | None:
    if mode == "recompute":
        return None
    seconds, size = fetch_seconds, 1.0
    if mode == "hcache":
        seconds, size = hcache_seconds, hcache_size(machine)
    tokens = math.inf if machine.host_tokens is None else machine.host_tokens / size
    return HostStore(partial(seconds, machine), tokens)


def build_admission(
    machine: Machine, settings: Settings, mode: Mode, clock: VirtualClock
) -> Admission:
    """How a server of this mode admits requests."""
    shared = (mode, settings.chunk_tokens, settings.max_running)
    if isinstance(mode, Balloon):
        return BalloonAdmission(mode, settings.chunk_tokens, settings.max_running)
    if settings.admission == "vllm":
        return MixedAdmission(*shared) if settings.mixed_chunks else VllmAdmission(*shared)
    if settings.admission == "paper":
        model = policy_model(machine, settings)
        return PaperAdmission(*shared, model, settings.tpot_slo_s, clock)
    pool_tokens = math.inf if settings.mode == "ellm" else machine.kv_tokens
    return SglangAdmission(*shared, settings.conservativeness, pool_tokens)


def slower(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The same machine where computing takes `factor` times as long; its link is as it was."""
    return dataclasses.replace(
        profile,
        flops=profile.flops / factor,
        device_bytes_per_s=profile.device_bytes_per_s / factor,
        kv_bytes_per_s=profile.kv_bytes_per_s and profile.kv_bytes_per_s / factor,
        attention_flops=profile.attention_flops / factor,
        step_overhead_s=profile.step_overhead_s * factor,
        row_overhead_s=profile.row_overhead_s * factor,
        restore_overhead_s=profile.restore_overhead_s * factor,
        recompute_overhead_s=profile.recompute_overhead_s * factor,
        phase_change_s=profile.phase_change_s * factor,
    )
