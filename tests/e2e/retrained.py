"""The demo model with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ellm_sgl.client.process import DEMO_MODEL


def retrained_into(folder: Path) -> Path:
    """Written there; returns the folder."""
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    noise = torch.Generator().manual_seed(1)
    weights = {
        name: weight * (1 + 0.2 * torch.randn(weight.shape, generator=noise))
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
