"""One way to serve a load, and the server that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ellm_sgl.serve.verify.loads import CHATS as CHATS_AT_ONCE
from ellm_sgl.serve.verify.loads import STREAMS
from ellm_sgl.serve.verify.model import ModelShape

CROWDED = 2 / 7
"""Share of a load's KV that the device holds where requests are to get in each other's way."""

PROMPTS, CHATS, ABORTS = ("prompts", "chats", "aborts")


@dataclass(frozen=True)
class Setting:
    """One way to serve a load."""

    name: str
    needs: tuple[str, ...] = ()
    """Counts of `Comparison` that are 0 only if the setting did not do what it is for."""
    load: str = PROMPTS
    policy: tuple[str, Mapping[str, Any]] | None = None
    """Name and options; None: as the server began."""
    device_tokens: int | None = None
    """Use only so much of the pool from now on; None: as much as before."""
    swing: tuple[int, int] | None = None
    """The pool has so many tokens by turns while the load runs, and the first ones afterwards."""


@dataclass(frozen=True)
class Stage:
    """Settings that one server runs, one after the other."""

    arguments: tuple[str, ...]
    """Of eLLM and SGLang, beside model and dtype."""
    settings: tuple[Setting, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """What settings depend on."""

    model: ModelShape
    longest: int
    """Tokens of the longest prompt,"""
    output_tokens: int
    """and of each answer."""
    load_tokens: Mapping[str, int]
    """KV that each load needs at once; tokens."""
    layer_group: int
    block_tokens: int

    @property
    def small(self) -> int:
        """Half of the longest request fits: every long prompt loses blocks while it runs."""
        return max(self.longest // 2, 4 * self.block_tokens)

    @property
    def tight(self) -> int:
        """A device with a block for each request that may run, and little more; tokens."""
        return (max(CHATS_AT_ONCE, STREAMS) + 2) * self.block_tokens

    def crowded(self, load: str) -> int:
        """A device that holds a part of the load; tokens."""
        return max(int(CROWDED * self.load_tokens[load]), 2 * self.tight)
