"""A store in a folder, with blocks whose data tells whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ellm_sgl.store import BlockStore, StoreFolder
from ellm_sgl.store.journal import RECORD_BYTES
from ellm_sgl.store.store import Bytes

BLOCK_BYTES = 96
MARK = "0123456789abcdef" * 2
OVERHEAD = 8 * RECORD_BYTES
"""Of a block's place in the journal, as the store counts it."""


def now(function: Any, *arguments: Any) -> Future[Any]:
    """Run a call at once; what it raises is the future's."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except OSError as error:
        future.set_exception(error)
    return future


def opened(path: Path, blocks: int = 64, mark: str = MARK, submit: Any = now) -> BlockStore:
    folder = StoreFolder(path, blocks * (BLOCK_BYTES + OVERHEAD))
    return BlockStore(folder, mark, BLOCK_BYTES, submit)


def let_go(store: BlockStore) -> None:
    """What the end of a process does, however it ends: the lock is free."""
    store._folder.close()


def keys_of(chain: int, count: int, first: int = 0) -> list[bytes]:
    return [b"%08d%08d" % (chain, depth) for depth in range(first, first + count)]


def data_of(keys: Sequence[bytes]) -> Bytes:
    repeated = [np.frombuffer(key * (BLOCK_BYTES // len(key)), np.uint8) for key in keys]
    return np.array(repeated).reshape(len(keys), BLOCK_BYTES)


def put(store: BlockStore, keys: list[bytes], depth: int = 0, stamp: int | None = None) -> int:
    return store.put(keys, depth, store.begin() if stamp is None else stamp, data_of(keys))


def read(store: BlockStore, keys: list[bytes]) -> int:
    """Leading blocks that can be read; what was read is what was put."""
    count = store.leading(keys)
    out = np.zeros((count, BLOCK_BYTES), np.uint8)
    intact = store.read(keys[:count], out)
    assert np.array_equal(out[:intact], data_of(keys[:intact]).reshape(intact, BLOCK_BYTES))
    return intact
