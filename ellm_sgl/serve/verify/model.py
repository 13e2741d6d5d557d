"""What `verify` has to know of a model before a server runs it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ellm_sgl.sglang import cuda


@dataclass(frozen=True)
class ModelShape:
    """Sizes from the model's `config.json`."""

    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, model_path: str) -> Self:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            vocabulary=config["vocab_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            hidden=config["hidden_size"],
        )

    @property
    def half_of_layers(self) -> int:
        return -(-self.layers // 2)

    def hidden_as_kv_tokens(self, tokens: int) -> int:
        """As much memory as hidden states of so many tokens take, in tokens of KV."""
        return -(-tokens * self.hidden // (2 * self.kv_heads * self.head_dim))

    def why_not_two_ranks(self) -> str | None:
        """Why two ranks cannot share this model on this machine; None if they can."""
        if self.heads % 2 or self.kv_heads % 2:
            return f"{self.heads} heads and {self.kv_heads} KV heads do not divide by 2"
        if cuda.available():
            import torch

            devices = torch.cuda.device_count()
            return None if devices >= 2 else "this machine has one CUDA device"
        return None if len(os.sched_getaffinity(0)) >= 2 else "this machine has one processor core"


def cores_of_two_ranks() -> dict[str, str]:
    """Environment of a server with two ranks: on a CPU, SGLang wants a core named for each."""
    if cuda.available():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
