"""Settings of one server, and how they reach its worker processes."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

ENV = "ELLM_SGL_CONFIG"
"""Environment variable that carries the settings to SGLang's worker processes.

Set: eLLM is enabled in this process and its children. Unset: SGLang is stock.
"""


class ConfigError(ValueError):
    """A setting that makes no sense; the message names the flag, the value and the remedy."""


@dataclass(frozen=True)
class EllmConfig:
    """Settings of eLLM. Each field is a command-line flag, `--ellm-` and the field's name."""

    policy: str = "fixed-ratio"
    ratio: float = 0.0
    layer_group: int = 4
    block_tokens: int = 16
    device_kv_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio < 1.0:
            raise ConfigError(
                f"--ellm-ratio {self.ratio}: give the share of each request's tokens to leave "
                "uncached, at least 0 and below 1"
            )
        if self.layer_group < 1:
            raise ConfigError(
                f"--ellm-layer-group {self.layer_group}: give the layers per group, at least 1"
            )
        if self.block_tokens < 1:
            raise ConfigError(
                f"--ellm-block-tokens {self.block_tokens}: give the tokens per block, at least 1"
            )
        if self.device_kv_tokens is not None and self.device_kv_tokens < self.block_tokens:
            raise ConfigError(
                f"--ellm-device-kv-tokens {self.device_kv_tokens}: the pool must hold at least one "
                f"block of {self.block_tokens} tokens (--ellm-block-tokens)"
            )

    def to_env(self) -> None:
        """Enable eLLM with these settings in this process and the ones it starts."""
        os.environ[ENV] = json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_env() -> EllmConfig | None:
        """The settings in force, or None where eLLM is not enabled."""
        text = os.environ.get(ENV)
        if not text:
            return None
        try:
            values: dict[str, Any] = json.loads(text)
            return EllmConfig(**values)
        except (json.JSONDecodeError, TypeError) as error:
            raise ConfigError(f"{ENV} does not hold eLLM settings: {error}") from error
