"""Policies by name: those that installed packages register, and ready ones made from them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import check_finite, shown
from ellm_sgl.policies.base import Policy
from ellm_sgl.worker import OverdueError, call_within

GROUP = "ellm_sgl.policies"
"""Entry-point group; each entry names a subclass of `Policy`."""

BUILD_LIMIT_S = 60.0
"""A policy may load a model of its own. One that hangs is told of, instead of a server that never
starts without a word."""


def installed() -> dict[str, EntryPoint]:
    """The registered policies by name, sorted. Reads metadata only: imports no plugin."""
    return {e.name: e for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def provider(entry: EntryPoint) -> str:
    """The package that registers a policy, with its version; "?" if it cannot be told."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "?"


def load(name: str) -> type[Policy]:
    """The class registered as `name`.

    Raises:
        ConfigError: no such policy, or two packages claim the name; it cannot be imported; it
            is not a policy.
    """
    entry = _entry(name)
    try:
        loaded = entry.load()
    except Exception as error:
        raise ConfigError(
            f"policy {name!r}: {entry.value} of {provider(entry)} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise ConfigError(
            f"policy {name!r}: {entry.value} of {provider(entry)} is {loaded!r}; it must be a "
            "subclass of ellm_sgl.policies.Policy"
        )
    return loaded


def create(name: str, options: Mapping[str, object], limit_s: float = BUILD_LIMIT_S) -> Policy:
    """A new instance of the policy registered as `name`, its constructor given `options`.

    Args:
        limit_s: seconds that the policy has to be imported and made.

    Raises:
        ConfigError: as `load`; an option that the constructor does not have, or a value that it
            refuses; a number that is not finite; the limit has passed.
    """
    try:
        for option, value in options.items():
            check_finite(value, option)
    except ValueError as error:
        raise ConfigError(f"policy {name!r}: option {error}") from None
    try:
        return call_within(limit_s, _make, name, options)
    except OverdueError:
        raise ConfigError(
            f"policy {name!r} is not ready after {limit_s:g} s: importing it, or its constructor, "
            "hangs; let it do less there, or use another policy"
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # it tried to end the process
        raise ConfigError(f"policy {name!r} cannot be made: {error}") from error


def _make(name: str, options: Mapping[str, object]) -> Policy:
    cls = load(name)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"policy {name!r}: {cls.__name__} does not implement {missing}")
    signature = inspect.signature(cls)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"policy {name!r}: {error} (options given: {shown(sorted(options))}); {cls.__name__} "
            f"takes {signature.replace(return_annotation=inspect.Signature.empty)}"
        ) from None
    try:
        return cls(**options)
    except Exception as error:
        raise ConfigError(
            f"policy {name!r} refuses its options {shown(dict(options))}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _entry(name: str) -> EntryPoint:
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise ConfigError(
            f"no policy {shown(name)}; installed: {', '.join(installed()) or 'none'} "
            "(ellm-sgl policies list)"
        )
    if len({e.value for e in found}) > 1:
        claims = ", ".join(f"{provider(e)} ({e.value})" for e in found)
        raise ConfigError(f"policy {name!r} is registered by several packages: {claims}; keep one")
    return found[0]
