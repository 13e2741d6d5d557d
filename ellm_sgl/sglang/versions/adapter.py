"""What one version of SGLang has in another place, or under another name, than the next."""

from __future__ import annotations

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import RadixKey

_HERE = Path(__file__).parent


class Adapter(ABC):
    """Of one version. Makes no decisions and keeps no state: each method is one difference."""

    version: str
    moved: ClassVar[Mapping[str, str]] = {}
    """Targets of hooks (`hooks.py`) that this version has elsewhere, and where."""

    # -- recorded beside the module -----------------------------------------------------------

    @cached_property
    def signatures(self) -> dict[str, str]:
        """Parameters of every function that eLLM hooks, overrides or calls by name, as
        `signatures.py` writes them."""
        found: dict[str, str] = json.loads(self._beside(".json").read_text())
        return found

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What is different from `arguments.toml`: rows of fields that are new, and under "gone"
        the fields that are no more."""
        path = self._beside(".toml")
        return tomllib.loads(path.read_text()) if path.exists() else {}

    def _beside(self, suffix: str) -> Path:
        return _HERE / f"v{self.version.replace('.', '_')}{suffix}"

    # -- SGLang's arguments -------------------------------------------------------------------

    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """Fields of `ServerArgs` and their defaults; None for those without one."""

    @abstractmethod
    def resolved(self, args: Any) -> Any:
        """The `ServerArgs` with what SGLang has decided; as they are before it has."""

    @abstractmethod
    def resolve(self, args: Any) -> None:
        """Let SGLang decide now, unless it has."""

    @abstractmethod
    def is_resolved(self, args: Any) -> bool:
        """Whether SGLang has decided, so that nothing can be set any more."""

    @abstractmethod
    def model_config(self, args: Any) -> Any:
        """SGLang's `ModelConfig` of the model that they name."""

    # -- requests -----------------------------------------------------------------------------

    @abstractmethod
    def kv(self, req: Req) -> Any:
        """What has a request's `req_pool_idx` (its row in `req_to_token`, None without KV),
        `cache_protected_len` and `kv_committed_len`."""

    @abstractmethod
    def rows(self, reqs: Sequence[Req]) -> list[int]:
        """The rows of requests that have KV."""

    @abstractmethod
    def radix_key(self, tokens: Any, req: Req) -> RadixKey:
        """The key under which the prefix cache keeps so many tokens of a request."""

    @abstractmethod
    def holds_frees(self, allocator: Any) -> bool:
        """Whether SGLang holds back what is freed until the end of a group (`free_group`)."""
