"""Blocks on disk: written beside the steps, read when a prompt begins with them.

One thread, the caller's, has the index; another writes. What waits is written together, first data,
then records; only when both have reached the disk these blocks can be found. So a crash loses what
was being written, and nothing is ever found that is not there in full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ellm_sgl.config import ConfigError
from ellm_sgl.store import records
from ellm_sgl.store.folder import StoreFolder
from ellm_sgl.store.index import Entry, Index, StoreFullError
from ellm_sgl.store.records import RECORD_BYTES

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
Submit = Callable[..., "Future[Any]"]

QUEUED_BYTES = 64 << 20
"""Of blocks that wait to be written, or as many blocks as come at once; while there are more, none
is taken."""
READ_BYTES = 64 << 20
"""Of blocks that are read at a time."""


@dataclass
class Totals:
    """Since the store was opened."""

    stored_blocks: int = 0
    read_blocks: int = 0
    damaged_blocks: int = 0
    """Whose checksum did not fit: dropped, and computed again."""


@dataclass
class _Batch:
    """Consecutive blocks of a request that are being written."""

    keys: list[bytes]
    slots: list[int]
    depth: int
    stamp: int
    data: Bytes
    entries: list[Entry] = field(default_factory=list)
    """Once they are on disk."""

    def entries_of(self) -> list[Entry]:
        """What their records say."""
        checksums = map(_checksum, self.keys, self.data)
        depths = range(self.depth, self.depth + len(self.keys))
        stamps = [self.stamp] * len(self.keys)
        return list(map(Entry, self.slots, depths, stamps, checksums))


class BlockStore:
    """The blocks of one fingerprint. A disk that fails is a `problem` that the log tells of once.

    Args:
        folder: in which they are.
        fingerprint: 32 hexadecimal digits.
        block_bytes: of one block's KV.
        submit: runs a call in the background, one after the other; its result is a future.
        at_once: blocks that may come at once, a chunk of a prompt.

    Raises:
        ConfigError: the folder's size has no room for a block.
    """

    def __init__(
        self,
        folder: StoreFolder,
        fingerprint: str,
        block_bytes: int,
        submit: Submit,
        at_once: int = 1,
    ) -> None:
        self.block_bytes = block_bytes
        self._at_once = at_once
        self.totals = Totals()
        self.nbytes = 0
        """On disk, of this fingerprint's data."""
        self.problem: str | None = None
        """Why nothing is stored any more; what is there can still be read."""
        self._folder = folder
        self._submit = submit
        most = folder.most_bytes // (block_bytes + RECORD_BYTES)
        if most < 1:
            raise ConfigError(
                f"--ellm-kv-store-size: {folder.most_bytes:,} bytes hold no block of "
                f"{block_bytes:,}; give more"
            )
        self._batches: deque[tuple[_Batch, Future[None]]] = deque()
        self._coming: set[bytes] = set()
        self._queue: deque[_Batch] = deque()
        """For the thread that writes,"""
        self._used: deque[tuple[bytes, Entry]] = deque()
        """and blocks whose records have changed."""
        self._files: list[int] = []
        self.index = Index(most, {})
        try:
            self._part = folder.part(fingerprint)
            self._data = self._open("blocks", most * block_bytes)
            self._records = self._open("records", most * RECORD_BYTES)
            self.index = Index(most, records.read(self._part / "records"))
            self._take(os.fstat(self._data).st_size // block_bytes)
        except OSError as error:
            self._stop(error)
        self._stamp = self.index.highest_stamp

    def _open(self, name: str, most_bytes: int) -> int:
        fd = os.open(self._part / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files.append(fd)
        if os.fstat(fd).st_size > most_bytes:
            os.ftruncate(fd, most_bytes)  # it may be smaller than it was
        return fd

    def close(self) -> None:
        """Wait for what is being written."""
        self._submit(self._close).result()
        self._settle()

    def _close(self) -> None:
        for fd in self._files:
            with contextlib.suppress(OSError):
                os.close(fd)

    def begin(self) -> int:
        """A stamp for a request that begins; larger than all before."""
        self._stamp += 1
        return self._stamp

    # -- store ------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether this block is there, or about to be."""
        return key in self._coming or self.index.get(key) is not None

    @property
    def room(self) -> int:
        """Blocks that can be taken now."""
        self._settle()
        if self.problem is not None:
            return 0
        queued = self.queued_bytes // self.block_bytes
        return max(_most_queued(self.block_bytes, self._at_once) - queued, 0)

    @property
    def queued_bytes(self) -> int:
        """Of memory that blocks have which wait to be written. On any thread."""
        batches = tuple(self._batches)  # in one go: others come and go meanwhile
        return sum(len(batch.keys) for batch, _ in batches) * self.block_bytes

    def put(
        self, keys: Sequence[bytes], depth: int, stamp: int, read: Callable[[int], Bytes]
    ) -> int:
        """Store consecutive blocks of one request; none of them is there.

        Args:
            keys: of n blocks, at most `room`.
            depth: blocks of the request before them.
            stamp: the request's (`begin`).
            read: gives the data of so many of them, [count, block_bytes], the store's from then on.

        Returns:
            The leading blocks taken; fewer than n where the store is full of blocks as recent.

        Raises:
            StoreFullError: none was.
        """
        self._settle()
        slots: list[int] = []
        try:
            for _ in keys:
                slots.append(self.index.take_slot(stamp))
        except StoreFullError:
            if not slots:
                raise
        count = len(slots)
        batch = _Batch(list(keys[:count]), slots, depth, stamp, read(count))
        self._queue.append(batch)
        self._batches.append((batch, self._submit(self._write)))
        self._coming.update(batch.keys)
        return count

    def _write(self) -> None:
        """In the background: all that waits."""
        batches = list(_taken_from(self._queue))
        # Taken after the batches and written before: what was in a slot that they write again.
        used = list(_taken_from(self._used))
        if self.problem is not None:
            return
        try:
            self._write_records(used)
            if batches:
                self._write_batches(batches)
        except Exception as error:
            self._stop(error)

    def _write_batches(self, batches: list[_Batch]) -> None:
        """Data, then records."""
        last = max(slot for batch in batches for slot in batch.slots)
        if last * self.block_bytes > self.nbytes:
            self._take(last)
        for batch in batches:
            for slot, block in zip(batch.slots, batch.data, strict=True):
                _write_all(self._data, block.data, (slot - 1) * self.block_bytes)
        os.fdatasync(self._data)
        entries = [batch.entries_of() for batch in batches]
        for batch, of_batch in zip(batches, entries, strict=True):
            self._write_records(zip(batch.keys, of_batch, strict=True))
        os.fdatasync(self._records)
        for batch, of_batch in zip(batches, entries, strict=True):
            batch.entries = of_batch

    def _write_records(self, blocks: Iterable[tuple[bytes, Entry]]) -> None:
        for key, entry in blocks:
            record = memoryview(records.pack(key, entry))
            _write_all(self._records, record, (entry.slot - 1) * RECORD_BYTES)

    def _take(self, slots: int) -> None:
        """So many slots are this part's, whatever other parts have to go for it."""
        self._folder.make_room(self._part, slots * (self.block_bytes + RECORD_BYTES))
        self.nbytes = slots * self.block_bytes

    def _settle(self) -> None:
        """What has been written can be found."""
        while self._batches and self._batches[0][1].done():
            batch, _ = self._batches.popleft()
            self._coming.difference_update(batch.keys)
            if not batch.entries:
                for slot in batch.slots:
                    self.index.give_slot(slot)
            for key, entry in zip(batch.keys, batch.entries, strict=False):
                self.index.add(key, entry)
            self.totals.stored_blocks += len(batch.entries)

    def _stop(self, error: Exception) -> None:
        """Nothing more is stored."""
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self.problem = f"{self._folder.path}: {reason}"
        logger.warning(
            "eLLM KV store: %s; nothing more is stored until the server is restarted, and what "
            "is there can still be read", self.problem,
        )  # fmt: skip

    # -- find -------------------------------------------------------------------------------

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first, are there."""
        self._settle()
        for count, key in enumerate(keys):
            if self.index.get(key) is None:
                return count
        return len(keys)

    def touch(self, keys: Sequence[bytes], stamp: int) -> None:
        """A request with this stamp has used these blocks."""
        if news := self.index.touch(keys, stamp):
            self._used.extend(news)
            self._submit(self._write)

    def read(self, keys: Sequence[bytes], out: Bytes) -> int:
        """Read blocks that are there.

        Args:
            keys: of n blocks.
            out: [n, block_bytes], to be filled.

        Returns:
            The leading blocks that are as they were written. The first that is not is dropped.
        """
        for count, key in enumerate(keys):
            entry = self.index.get(key)
            if entry is None:
                return count
            if not self._intact(key, entry, out[count]):
                self.totals.damaged_blocks += 1
                self.index.drop(key)
                return count
            self.totals.read_blocks += 1
        return len(keys)

    def _intact(self, key: bytes, entry: Entry, out: Bytes) -> bool:
        """Read one block, and compare it with its checksum."""
        try:
            got = os.preadv(self._data, [out.data], (entry.slot - 1) * self.block_bytes)
        except OSError:
            return False
        return got == self.block_bytes and _checksum(key, out) == entry.crc


def most_buffered(block_bytes: int, at_once: int) -> int:
    """Bytes of memory that a store of such blocks, so many of which come at once, may have in
    use."""
    return _most_queued(block_bytes, at_once) * block_bytes + max(READ_BYTES, block_bytes)


def _most_queued(block_bytes: int, at_once: int) -> int:
    """Blocks: of a chunk that is computed none waits for room until the next one is."""
    return max(QUEUED_BYTES // block_bytes, at_once)


def _checksum(key: bytes, block: Bytes) -> int:
    return zlib.crc32(block.data, zlib.crc32(key))


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _taken_from(queue: deque[T]) -> Iterator[T]:
    """What another thread puts at the other end."""
    while queue:
        yield queue.popleft()
