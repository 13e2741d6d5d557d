"""A store in a folder, with blocks whose data tells whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ellm_sgl.store import BlockStore, Bytes, StoreFolder, StoreFullError
from ellm_sgl.store.records import RECORD_BYTES

BLOCK_BYTES = 96
MARK = "0123456789abcdef" * 2


def now(function: Any, *arguments: Any) -> Future[Any]:
    """Run a call at once; what it raises is the future's."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except OSError as error:
        future.set_exception(error)
    return future


def opened(
    path: Path, blocks: int = 64, mark: str = MARK, submit: Any = now, at_once: int = 1
) -> BlockStore:
    folder = StoreFolder(path, blocks * (BLOCK_BYTES + RECORD_BYTES))
    return BlockStore(folder, mark, BLOCK_BYTES, submit, at_once)


def let_go(store: BlockStore) -> None:
    """What the end of a process does, however it ends: the lock is free."""
    store._folder.close()


def keys_of(chain: int, count: int, first: int = 0) -> list[bytes]:
    return [b"%08d%08d" % (chain, depth) for depth in range(first, first + count)]


def data_of(keys: Sequence[bytes]) -> Bytes:
    repeated = [np.frombuffer(key * (BLOCK_BYTES // len(key)), np.uint8) for key in keys]
    return np.array(repeated).reshape(len(keys), BLOCK_BYTES)


def put(store: BlockStore, keys: list[bytes], depth: int = 0, stamp: int | None = None) -> int:
    """How many blocks the store takes."""
    stamp = store.begin() if stamp is None else stamp
    try:
        return store.put(keys, depth, stamp, lambda count: data_of(keys[:count]))
    except StoreFullError:
        return 0


def read(store: BlockStore, keys: list[bytes]) -> int:
    """Leading blocks that can be read; what was read is what was put."""
    count = store.leading(keys)
    out = np.zeros((count, BLOCK_BYTES), np.uint8)
    intact = store.read(keys[:count], out)
    assert np.array_equal(out[:intact], data_of(keys[:intact]).reshape(intact, BLOCK_BYTES))
    return intact
