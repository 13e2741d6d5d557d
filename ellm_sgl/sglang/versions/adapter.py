"""What one version of SGLang has in another place, or under another name, than the next."""

from __future__ import annotations

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.mem_cache.radix_cache import RadixCache as _Tree

    from ellm_sgl.step.separate import Through
else:  # versions are asked where SGLang cannot be imported
    _Tree = ABC

_HERE = Path(__file__).parent


class TreeCalls(_Tree):
    """What SGLang calls of its prefix tree when a request goes on or goes, and what of ours that is
    (`prefix_cache.py`). Stands before SGLang's class among the bases."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Within it a match does not end at what is missing: a request's own blocks are its own."""

    @abstractmethod
    def stays(self, req: Req) -> None:
        """The tree has a request's blocks now, and it goes on with those that the tree had."""

    @abstractmethod
    def leaves(self, req: Req) -> None:
        """It is about to give back its row, with all its KV still there."""

    @abstractmethod
    def has_left(self, req: Req, tokens: int) -> None:
        """Of so many tokens its KV was; now it uses nothing any more."""


class Adapter(ABC):
    """Of one version. Makes no decisions and keeps no state: each method is one difference."""

    version: str
    moved: ClassVar[Mapping[str, str]] = {}
    """Targets of hooks (`hooks.py`) that this version has elsewhere, and where."""
    tree_calls: ClassVar[type[TreeCalls]]
    rows_field: ClassVar[str]
    """Of a `ForwardBatch`: how many rows it has, padding aside."""
    times_out_alike: ClassVar[bool]
    """Whether one rank tells all who has waited or run for too long; else each looks at its own
    clock, and they may differ."""
    has_chunk_cache: ClassVar[bool]
    """Whether there is one in place of a disabled tree (`chunk_cache.py`)."""

    # -- recorded beside the module -----------------------------------------------------------

    @cached_property
    def signatures(self) -> dict[str, str]:
        """Parameters of every function that eLLM hooks, overrides or calls by name, as
        `signatures.py` writes them."""
        found: dict[str, str] = json.loads(self._beside(".json").read_text())
        return found

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What is different from `arguments.toml`, or, under "after", from another version: rows of
        fields that are new or otherwise, and under "gone" those that are no more, or were so."""
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

    # -- the scheduler ------------------------------------------------------------------------

    @abstractmethod
    def ranks(self, scheduler: Scheduler) -> Any:
        """What has `tp_rank`, `tp_size` and `dp_rank` (None without data parallelism)."""

    @abstractmethod
    def charged(self, adder: PrefillAdder) -> float:
        """Tokens that it keeps for those that run or are admitted, in the long run."""

    @abstractmethod
    def charge(self, adder: PrefillAdder, eventual: float, present: float) -> None:
        """Have it count on so many tokens less: in the long run, and now."""

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
    def namespaces(self, req: Req) -> list[str | None]:
        """What of such a key keeps requests apart whose tokens are the same."""

    @abstractmethod
    def prefix_tokens(self, req: Req) -> int:
        """Tokens of it that are computed, or found in the tree."""

    @abstractmethod
    def release(self, req: Req, tree: BasePrefixCache) -> None:
        """A finished request gives its KV back, what can be reused to the tree."""

    # -- the model ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def through_layers(self) -> Through:
        """Has rows go through a model's decoder layers."""

    # -- memory -------------------------------------------------------------------------------

    @abstractmethod
    def matched(self, tree: RadixCache, result: MatchResult) -> torch.Tensor:
        """Slots of what matches, in token order, int64."""

    @abstractmethod
    def holds_frees(self, allocator: Any) -> bool:
        """Whether SGLang holds back what is freed until the end of a group (`free_group`)."""
