"""Settings of one server, from its flags: checked once, wherever they were given; and the policy
that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ellm_sgl.budget import check_budget
from ellm_sgl.config import ELLM, HCACHE, OFF, RECOMPUTE, EllmConfig
from ellm_sgl.config.flags import POLICY, read_settings
from ellm_sgl.policies import Policy, Stock
from ellm_sgl.policies.baselines.whole_requests import WholeRequests
from ellm_sgl.policies.registry import create

DEFAULT_POLICY = "fcfs"


def settings_of(given: Mapping[str, object]) -> EllmConfig | None:
    """The settings where eLLM is meant to be on: with a policy even if none was named; None: off.

    Args:
        given: as `read_settings`.

    Raises:
        ConfigError: as `read_settings` and `resolve`.
    """
    values = read_settings(given)
    mode = values.get("mode", ELLM)
    values.setdefault(POLICY, DEFAULT_POLICY if mode == ELLM else mode)
    return None if values[POLICY] == OFF else resolve(values)


def resolve(values: Mapping[str, Any]) -> EllmConfig:
    """The settings, proved to make sense before a server starts.

    Args:
        values: fields of `EllmConfig` that were given.

    Raises:
        ConfigError: a value out of range, a policy or an option that does not exist, a memory
            budget that is another's, or cannot be made.
    """
    if values.get("mode") == HCACHE:
        values = {"host_keeps": "mixed", **values}
    config = EllmConfig(**values)
    policy_of(config)
    if config.budget is not None:
        check_budget(config.budget)
    return config


def policy_of(config: EllmConfig) -> Policy:
    """What decides on a server with these settings. Baselines move whole requests, on the same
    pool and kernels; what one keeps of its original, and what not, is told in docs/policies.md.

    Raises:
        ConfigError: as `registry.create`.
    """
    if not config.is_baseline:
        return create(config.policy, config.options)
    return Stock() if config.mode == RECOMPUTE else WholeRequests()
