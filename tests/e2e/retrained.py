"""The demo model with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ellm_sgl.client.process import DEMO_MODEL

EMBEDDING = "model.embed_tokens.weight"


def retrained_into(folder: Path, from_row: int | None = None) -> Path:
    """Written there; returns the folder.

    Args:
        from_row: only embeddings of tokens from this one on are others.
    """
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    noise = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    changed = list(weights.values()) if from_row is None else [weights[EMBEDDING][from_row:]]
    for weight in changed:
        weight *= 1 + 0.2 * torch.randn(weight.shape, generator=noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
