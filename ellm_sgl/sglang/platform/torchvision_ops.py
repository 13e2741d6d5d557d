"""Lets SGLang import torchvision where only its Python half works.

No registry has a torchvision whose C++ operators load beside the CPU build of PyTorch, and
torchvision's Python code registers fake kernels for two of those operators on import. Declared
here, without an implementation, the import succeeds; nothing SGLang does for text calls them.
"""

from __future__ import annotations

import importlib.util

import torch

_LIBRARY: torch.library.Library | None = None


def declare() -> None:
    """Declare `torchvision::nms` and `::qnms` if this PyTorch is a CPU build.

    Call it in every process before SGLang is first imported. Does nothing where torchvision's
    own operators can load (a CUDA or ROCm build of PyTorch), and nothing the second time.
    """
    global _LIBRARY
    if _LIBRARY is not None or torch.version.cuda or torch.version.hip:
        return
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY = library
