"""Lets SGLang import torchvision where only its Python half works.

Few registries have a torchvision whose C++ operators load beside the CPU build of PyTorch, and
torchvision's Python code registers fake kernels for two of those operators on import. Declared
here, without an implementation, the import succeeds; nothing SGLang does for text calls them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_called = False
_LIBRARY: torch.library.Library | None = None


def declare() -> None:
    """Declare `torchvision::nms` and `::qnms` if this PyTorch is a CPU build.

    Importing `ellm_sgl` has it called in time. Does nothing where torchvision's own operators can
    load (a CUDA or ROCm build of PyTorch), and nothing the second time.
    """
    global _called, _LIBRARY
    if _called or torch.version.cuda or torch.version.hip:
        return
    _called = True  # by now: looking for torchvision asks for this again
    found = importlib.util.find_spec("torchvision")
    if found is None or any(map(_loads, found.submodule_search_locations or ())):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY = library


def _loads(folder: str) -> bool:
    """Whether torchvision's operators load, which torchvision itself then does once more."""
    for path in Path(folder).glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            continue
        return True
    return False
