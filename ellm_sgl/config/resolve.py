"""Settings of one server, from its flags: checked once, wherever they were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ellm_sgl import host_file
from ellm_sgl.config import HCACHE, EllmConfig
from ellm_sgl.config.modes import policy_of


def resolve(values: Mapping[str, Any]) -> EllmConfig:
    """The settings, proved to make sense before a server starts.

    Args:
        values: fields of `EllmConfig` that were given.

    Raises:
        ConfigError: a value out of range, a policy or an option that does not exist, a file for
            the host tier that is another's, or cannot be made.
    """
    if values.get("mode") == HCACHE:
        values = {"host_keeps": "mixed", **values}
    config = EllmConfig(**values)
    policy_of(config)
    if config.host_path is not None:
        host_file.check(host_file.file_of(config.host_path))
    return config
