"""Names of blocks: what a block's KV depends on is its tokens and all that are before them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16


class Chain:
    """Keys of one request's full blocks; the key of each is a hash of it and of the key before.

    Args:
        block_tokens: tokens per block.
        namespaces: keep apart requests that must not share KV; any JSON.
    """

    def __init__(self, block_tokens: int, namespaces: Sequence[object] = ()) -> None:
        self.keys: list[bytes] = []
        self._block_tokens = block_tokens
        text = json.dumps(list(namespaces))  # escapes whatever cannot be encoded
        self._root = hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()

    def extend(self, tokens: npt.NDArray[np.int64]) -> None:
        """Add the tokens behind the last full block; those that fill no block are not taken."""
        data = np.ascontiguousarray(tokens, "<i8")
        last = self.keys[-1] if self.keys else self._root
        for at in range(0, len(data) - self._block_tokens + 1, self._block_tokens):
            block = data[at : at + self._block_tokens].tobytes()
            last = hashlib.blake2b(last + block, digest_size=KEY_BYTES).digest()
            self.keys.append(last)

    @property
    def tokens(self) -> int:
        """Tokens of the blocks that have keys."""
        return len(self.keys) * self._block_tokens
