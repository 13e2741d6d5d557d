"""Settings of one server, from its flags: checked once, wherever they were given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ellm_sgl.config import HCACHE, ConfigError, EllmConfig
from ellm_sgl.modes import policy_of


def settle(values: Mapping[str, Any]) -> EllmConfig:
    """The settings, proved to make sense before a server starts.

    Args:
        values: fields of `EllmConfig` that were given.

    Raises:
        ConfigError: a value out of range, a policy or an option that does not exist, a file for
            the host tier that cannot be written.
    """
    if values.get("mode") == HCACHE:
        values = {"host_keeps": "mixed", **values}
    config = EllmConfig(**values)
    policy_of(config)
    _check_host_path(config.host_path)
    return config


def _check_host_path(path: str | None) -> None:
    """Whether the host tier's file can be made, or be written to."""
    if path is None:
        return
    place = Path(path) if Path(path).exists() else Path(path).absolute().parent
    if Path(path).is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"--ellm-host-path {path}: give a file in a folder that can be written")
