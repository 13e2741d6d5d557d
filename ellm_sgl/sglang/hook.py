"""One hook on SGLang: where, how, when, why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class When(Enum):
    """When a hook is installed, in every process that loads SGLang's plugins."""

    ALWAYS = "always"
    """Inert unless eLLM is enabled, which arguments may do after plugins were loaded."""
    PLATFORM = "platform"
    """On hosts where the CPU platform is offered."""
    ENABLED = "enabled"
    """Where eLLM is enabled when plugins are loaded: SGLang's worker processes."""


@dataclass(frozen=True)
class Seam:
    """One hook on SGLang."""

    target: str
    """Dotted path of the SGLang function."""
    kind: str
    """`HookType` by name: BEFORE, AFTER or AROUND."""
    hook: str
    """Ours, as "module:function"."""
    when: When
    reason: str
