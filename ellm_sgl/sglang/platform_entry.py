"""Entry point `sglang.srt.platforms`: offers the CPU platform where there is no accelerator."""

from __future__ import annotations

import os
import platform

import torch

ATTENTION_BACKEND = "torch_native"
"""SGLang takes its paths without Triton kernels for this name, whatever class it stands for. With
eLLM enabled on the CPU platform it stands for eLLM's."""

PLATFORM = "ellm_sgl.sglang.platform.cpu:EllmCpuPlatform"


def activate() -> str | None:
    """Name of the platform class, or None to leave the choice to SGLang.

    None wherever an accelerator is present, off x86, and where SGLang's own CPU engine is asked
    for (`SGLANG_USE_CPU_ENGINE=1`).
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    # False for a CPU build of PyTorch and for a CUDA build without a device alike.
    return None if torch.accelerator.is_available() else PLATFORM
