"""Settings of one server, and how they reach its worker processes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ellm_sgl.config.ranges import (
    MILLISECONDS,
    MOST_TOKENS,
    SECONDS,
    SHARE,
    TOKENS,
    Range,
    read_json,
    shown,
)
from ellm_sgl.config.sizes import MemoryBudget, read_budget, read_size

ENV = "ELLM_SGL_SETTINGS"
"""Environment variable that carries the settings to SGLang's worker processes.

Set: eLLM is enabled in this process and its children. Unset: SGLang is stock.
"""


LATENCY_MODELS = ("roofline", "paper")
ELLM, RECOMPUTE, SWAP, HCACHE = MODES = ("ellm", "recompute", "swap", "hcache")
"""The first decides by a policy; the others are baselines and decide by themselves."""
OFF = "off"
"""Instead of a policy's name: stock SGLang."""
HOST_KEEPS = ("kv", "hidden", MIXED := "mixed")
HOST, DEVICE = HIDDEN_ON = ("host", "device")


class ConfigError(ValueError):
    """A setting that makes no sense; the message names the flag, the value and the remedy."""


_NUMBERS = {
    "ratio": (SHARE, "the share of each request's tokens to leave uncached"),
    "policy_budget_ms": (MILLISECONDS, "milliseconds"),
    "tpot_slo_ms": (MILLISECONDS, "milliseconds"),
    "layer_group": (TOKENS, "the layers per group"),
    "block_tokens": (TOKENS, "the tokens per block"),
    "device_kv_tokens": (TOKENS, "the tokens of KV that the device pool holds"),
    "max_device_kv_tokens": (TOKENS, "the most tokens of KV that the device pool may come to hold"),
    "min_device_kv_tokens": (TOKENS, "the tokens of KV that the device pool always keeps"),
    "idle_release_s": (SECONDS, "the seconds without requests after which memory goes back"),
    "host_kv_tokens": (
        Range(0, MOST_TOKENS, whole=True),
        "the tokens of KV that host memory may hold, 0 for none",
    ),
}
"""What each of these fields may be, and what it is, in words."""
_CHOICES = {"mode": MODES, "latency_model": LATENCY_MODELS, "hidden_on": HIDDEN_ON}
_OPTIONAL = (
    "ratio",
    "tpot_slo_ms",
    "device_kv_tokens",
    "max_device_kv_tokens",
    "min_device_kv_tokens",
    "idle_release_s",
)


def _flag(field: str) -> str:
    return "--ellm-" + field.replace("_", "-")


def _is_layer_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 6


@dataclass(frozen=True)
class EllmConfig:
    """Settings of eLLM. Each field is a command-line flag, `--ellm-` and the field's name."""

    mode: str = ELLM
    policy: str = "fixed-ratio"
    """Of a baseline: its own name."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    ratio: float | None = None
    policy_budget_ms: float = 5.0
    latency_model: str = "roofline"
    tpot_slo_ms: float | None = None
    layer_group: int = 4
    block_tokens: int = 16
    device_kv_tokens: int | None = None
    max_device_kv_tokens: int | None = None
    min_device_kv_tokens: int | None = None
    memory_budget: str | None = None
    """NAME:SIZE, see `budget`."""
    idle_release_s: float | None = None
    idle_keep_prefixes: bool = True
    host_kv_tokens: int = 0
    host_scaling: bool = False
    host_path: str | None = None
    host_keeps: str = "kv"
    hidden_on: str = HOST
    kv_store: str | None = None
    """A folder, see `ellm_sgl.store`."""
    kv_store_size: str = "16GiB"
    overlap: bool = True
    fusion: bool = True

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states of any layer are kept instead of KV."""
        return self.host_keeps not in ("kv", "0")

    @property
    def hidden_in_file(self) -> bool:
        """Whether hidden states have a file of their own."""
        return self.host_path is not None and self.keeps_hidden and self.hidden_on == HOST

    def __post_init__(self) -> None:
        for name, names in _CHOICES.items():
            if (value := getattr(self, name)) not in names:
                raise ConfigError(f"{_flag(name)} {value}: give one of {', '.join(names)}")
        if self.is_baseline:
            self._check_baseline()
        if self.ratio is not None and self.policy != "fixed-ratio":
            raise ConfigError(
                f"--ellm-ratio {self.ratio}: only the policy fixed-ratio takes it, and the policy "
                f"is {self.policy}; leave it out"
            )
        self._check_numbers()
        if self.device_kv_tokens is not None and self.device_kv_tokens < self.block_tokens:
            raise ConfigError(
                f"--ellm-device-kv-tokens {self.device_kv_tokens}: the pool must hold at least one "
                f"block of {self.block_tokens} tokens (--ellm-block-tokens)"
            )
        self._check_most()
        self._check_budget()
        self._check_store()
        if self.host_keeps not in HOST_KEEPS and not _is_layer_count(self.host_keeps):
            raise ConfigError(
                f"--ellm-host-keeps {self.host_keeps[:80]}: give {', '.join(HOST_KEEPS)} or a "
                "number of layers"
            )
        if self.host_kv_tokens == 0 and (wanting := self._wants_host_tier()):
            raise ConfigError(f"{wanting} needs --ellm-host-kv-tokens, the size of the host tier")
        if self.hidden_on == DEVICE and not self.keeps_hidden:
            raise ConfigError(
                f"--ellm-hidden-on {DEVICE} needs --ellm-host-keeps hidden, mixed or a number of "
                "layers: hidden states are kept of none"
            )
        if self.hidden_on == DEVICE and self.host_keeps == "hidden" and self.host_path is not None:
            raise ConfigError(
                f"--ellm-host-path {self.host_path}: nothing would be in it, since all that is "
                f"kept is on the device (--ellm-hidden-on {DEVICE}); leave it out"
            )
        if self.hidden_on == DEVICE and self.mode == RECOMPUTE:
            raise ConfigError(
                f"--ellm-hidden-on {DEVICE}: mode {RECOMPUTE} keeps nothing beside the pool; leave "
                "it out"
            )
        if not self.fusion and self.keeps_hidden:
            raise ConfigError(
                "--ellm-fusion off: hidden states are captured in fused passes only; leave out "
                f"--ellm-host-keeps {self.host_keeps}"
            )

    def _check_numbers(self) -> None:
        for name, (allowed, what) in _NUMBERS.items():
            value = getattr(self, name)
            if value not in allowed and (value is not None or name not in _OPTIONAL):
                raise ConfigError(f"{_flag(name)} {shown(value)}: give {what}, {allowed}")

    def _check_most(self) -> None:
        """Of a pool that may grow."""
        most, start = self.max_device_kv_tokens, self.device_kv_tokens
        if most is None:
            return
        flag = f"--ellm-max-device-kv-tokens {most}"
        if self.mode == RECOMPUTE:
            raise ConfigError(f"{flag}: mode {RECOMPUTE} leaves memory to SGLang; leave it out")
        if start is not None and most < start:
            raise ConfigError(
                f"{flag}: the pool starts with --ellm-device-kv-tokens {start}; give as many or "
                "more"
            )
        if most < self.block_tokens:
            raise ConfigError(
                f"{flag}: the pool must hold at least one block of {self.block_tokens} tokens "
                "(--ellm-block-tokens)"
            )

    def _check_budget(self) -> None:
        """And of the floor, which is for servers whose size others change."""
        least, start = self.min_device_kv_tokens, self.device_kv_tokens
        try:
            budget = self.budget
        except ValueError as error:
            raise ConfigError(
                f"--ellm-memory-budget {shown(self.memory_budget)}: give NAME:SIZE; {error}"
            ) from None
        if self.resizes_itself and self.mode == RECOMPUTE:
            given = "memory_budget" if budget is not None else "idle_release_s"
            raise ConfigError(
                f"{_flag(given)} {getattr(self, given)}: mode {RECOMPUTE} leaves memory to SGLang; "
                "leave it out"
            )
        if self.host_scaling and not self.host_kv_tokens:
            raise ConfigError(
                "--ellm-host-scaling on needs --ellm-host-kv-tokens, the size of the host tier"
            )
        if not self.idle_keep_prefixes and self.idle_release_s is None:
            raise ConfigError("--ellm-idle-keep-prefixes off needs --ellm-idle-release-s")
        if least is None:
            return
        flag = f"--ellm-min-device-kv-tokens {least}"
        if not self.resizes_itself:
            raise ConfigError(
                f"{flag} needs --ellm-memory-budget or --ellm-idle-release-s: nothing else takes "
                "memory away"
            )
        if start is not None and least > start:
            raise ConfigError(
                f"{flag}: the pool starts with --ellm-device-kv-tokens {start}; give fewer"
            )

    def _check_store(self) -> None:
        try:
            read_size(self.kv_store_size)
        except ValueError as error:
            raise ConfigError(f"--ellm-kv-store-size: {error}") from None
        if self.kv_store is None:
            if self.kv_store_size != EllmConfig.kv_store_size:
                raise ConfigError(
                    f"--ellm-kv-store-size {self.kv_store_size} needs --ellm-kv-store, a folder"
                )
        elif self.is_baseline:
            raise ConfigError(
                f"--ellm-kv-store {self.kv_store}: mode {self.mode} stores nothing; leave it out"
            )

    def _check_baseline(self) -> None:
        if self.policy != self.mode:
            raise ConfigError(
                f"--ellm-policy {self.policy}: mode {self.mode} decides by itself; leave it out"
            )
        if self.policy_options:
            raise ConfigError(
                f"--ellm-policy-options {json.dumps(self.policy_options)}: mode {self.mode} has "
                "none; leave it out"
            )
        if self.mode == HCACHE and self.host_keeps == "kv":
            raise ConfigError(
                f"--ellm-host-keeps kv: mode {HCACHE} restores from hidden states; leave it "
                "out, or give hidden or a number of layers"
            )

    def _wants_host_tier(self) -> str | None:
        """What was given that there has to be one for, as a flag."""
        if self.mode in (SWAP, HCACHE):
            return f"--ellm-mode {self.mode}"
        if self.host_path is not None:
            return f"--ellm-host-path {self.host_path}"
        return f"--ellm-host-keeps {self.host_keeps}" if self.keeps_hidden else None

    @property
    def budget(self) -> MemoryBudget | None:
        """What this server shares with others; ValueError where it makes no sense."""
        return None if self.memory_budget is None else read_budget(self.memory_budget)

    @property
    def resizes_itself(self) -> bool:
        """Whether the pool's size also follows what requests need."""
        return self.memory_budget is not None or self.idle_release_s is not None

    @property
    def is_baseline(self) -> bool:
        """Whether whole requests are moved, as other systems do, instead of parts."""
        return self.mode != ELLM

    @property
    def options(self) -> dict[str, Any]:
        """What the policy's constructor is given."""
        ratio = {} if self.ratio is None else {"ratio": self.ratio}
        return {**self.policy_options, **ratio}

    def to_json(self) -> str:
        """What `ENV` holds where these settings are in force."""
        return json.dumps(dataclasses.asdict(self))

    def to_env(self) -> None:
        """Enable eLLM with these settings in this process and the ones it starts."""
        os.environ[ENV] = self.to_json()

    @staticmethod
    def clear_env() -> None:
        """Disable eLLM in this process and its children."""
        os.environ.pop(ENV, None)

    @staticmethod
    def from_env() -> EllmConfig | None:
        """The settings in force, or None where eLLM is not enabled."""
        text = os.environ.get(ENV)
        if not text:
            return None
        try:
            return EllmConfig(**read_json(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{ENV} does not hold eLLM settings: {error}") from error
