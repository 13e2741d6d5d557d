"""eLLM for SGLang: partial KV caching with exact restoration."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ellm-sgl")
except PackageNotFoundError:  # imported from a checkout that was never installed
    __version__ = "0+checkout"

__all__ = ["__version__"]
