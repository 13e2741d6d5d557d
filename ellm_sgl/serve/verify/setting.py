"""One way to serve a load, the server that does, and what both depend on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ellm_sgl.latency import ModelShape
from ellm_sgl.serve.verify.loads import CHATS as CHATS_AT_ONCE
from ellm_sgl.serve.verify.loads import STREAMS
from ellm_sgl.sglang import cuda

CROWDED = 2 / 7
"""Share of a load's KV that the device holds where requests are to get in each other's way."""

RESIZED = ("resized",)
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
    resizes: int = 0
    """Or it comes to so many random sizes, between a block for each request and `device_tokens` or
    what the server may have; the load runs again until it has."""


@dataclass(frozen=True)
class Stage:
    """Settings that one server runs, one after the other."""

    arguments: tuple[str, ...]
    """Of eLLM and SGLang, beside model and dtype."""
    settings: tuple[Setting, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    store: bool = False
    """Each setting has a server of its own, and all of these have one store on disk."""

    def with_resizes(self, count: int) -> Stage:
        """The same, with so many random resizes in every setting."""
        settings = [
            replace(s, resizes=count, swing=None, needs=(*s.needs, *RESIZED)) for s in self.settings
        ]
        return replace(self, settings=tuple(settings))


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

    def hidden_as_kv_tokens(self, tokens: int) -> int:
        """As much memory as hidden states of so many tokens take, in tokens of KV."""
        return -(-tokens * self.model.hidden // (2 * self.model.kv_heads * self.model.head_dim))


def why_not_two_ranks(model: ModelShape) -> str | None:
    """Why two ranks cannot share this model on this machine; None if they can."""
    if model.heads % 2 or model.kv_heads % 2:
        return f"{model.heads} heads and {model.kv_heads} KV heads do not divide by 2"
    if cuda.available():
        import torch

        return None if torch.cuda.device_count() >= 2 else "this machine has one CUDA device"
    return None if len(os.sched_getaffinity(0)) >= 2 else "this machine has one processor core"


def cores_of_two_ranks() -> dict[str, str]:
    """Environment of a server with two ranks: on a CPU, SGLang wants a core named for each."""
    if cuda.available():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
