"""eLLM for SGLang: partial KV caching with exact restoration.

Importing this package is cheap. It does one thing: it sees to it that SGLang can be imported where
PyTorch is a CPU build (`sglang/platform/torchvision_ops.py`). So import it first.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ellm_sgl.config import ConfigError, EllmConfig
    from ellm_sgl.sglang.enabling import enabled
    from ellm_sgl.sglang.offline_engine import Engine

try:
    __version__ = version("ellm-sgl")
except PackageNotFoundError:  # imported from a checkout that was never installed
    __version__ = "0+checkout"

__all__ = ["ConfigError", "EllmConfig", "Engine", "__version__", "enabled"]


def __getattr__(name: str) -> Any:
    """What takes time to import is imported when it is asked for."""
    if name == "Engine":
        from ellm_sgl.sglang.offline_engine import Engine

        return Engine
    if name == "enabled":
        from ellm_sgl.sglang.enabling import enabled

        return enabled
    if name in ("ConfigError", "EllmConfig"):
        from ellm_sgl import config

        return getattr(config, name)
    raise AttributeError(f"module 'ellm_sgl' has no attribute {name!r}")


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; acts once, when torchvision is about to be imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from ellm_sgl.sglang.platform.torchvision_ops import declare

            declare()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
