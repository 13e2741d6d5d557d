"""Blocks on disk: written beside the steps, read when a prompt begins with them.

One thread, the caller's, has the index; another writes. A batch is first data, then records; only
when both have reached the disk its blocks can be found. So a crash loses what was being written,
and nothing is ever found that is not there in full.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.config import ConfigError
from ellm_sgl.store import journal
from ellm_sgl.store.folder import StoreFolder
from ellm_sgl.store.index import Entry, Index, StoreFullError

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Submit = Callable[..., "Future[Any]"]

QUEUED_BYTES = 64 << 20
"""Of blocks that wait to be written; while there are more, none is taken."""
_RECORDS_PER_BLOCK = 4
"""Records of a journal, per slot, at which it is written anew."""


@dataclass
class Totals:
    """Since the store was opened."""

    stored_blocks: int = 0
    read_blocks: int = 0
    damaged_blocks: int = 0
    """Whose checksum did not fit: dropped, and computed again."""


@dataclass(frozen=True)
class _Batch:
    """Blocks that are being written."""

    keys: list[bytes]
    slots: list[int]
    depths: list[int]
    stamp: int
    nbytes: int
    written: Future[list[int]]
    """Gives their checksums."""


class BlockStore:
    """The blocks of one fingerprint.

    Args:
        folder: in which they are.
        fingerprint: 32 hexadecimal digits.
        block_bytes: of one block's KV.
        submit: runs a call in the background, one after the other; its result is a future.

    Raises:
        ConfigError: the folder's size has no room for a block.
    """

    def __init__(
        self, folder: StoreFolder, fingerprint: str, block_bytes: int, submit: Submit
    ) -> None:
        self.block_bytes = block_bytes
        self.totals = Totals()
        self.problem: str | None = None
        """Why nothing is stored any more; what is there can still be read."""
        self._folder = folder
        self._submit = submit
        self._part = folder.part(fingerprint)
        self._journal = self._part / "journal"
        most = folder.most_bytes // (block_bytes + 2 * _RECORDS_PER_BLOCK * journal.RECORD_BYTES)
        if most < 1:
            raise ConfigError(
                f"--ellm-kv-store-size: {folder.most_bytes:,} bytes hold no block of "
                f"{block_bytes:,}; give more"
            )
        self.index = Index(most, journal.read(self._journal, most))
        self._stamp = self.index.highest_stamp
        self._batches: deque[_Batch] = deque()
        self._coming: set[bytes] = set()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._data = os.open(self._part / "blocks", flags, 0o600)
        if os.fstat(self._data).st_size > most * block_bytes:
            os.ftruncate(self._data, most * block_bytes)  # it may be smaller than it was
        self._records = len(self.index)
        try:
            journal.write_anew(self._journal, self.index.items())
        except OSError as error:
            self._stop(error)

    @property
    def nbytes(self) -> int:
        """On disk, of this fingerprint's data."""
        return os.fstat(self._data).st_size

    def close(self) -> None:
        """Wait for what is being written, and leave the order of use behind."""
        while self._batches:
            self._settle(wait=True)
        if self.problem is None:
            journal.write_anew(self._journal, self.index.items())
        os.close(self._data)

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
        queued = sum(batch.nbytes for batch in self._batches)
        return max(QUEUED_BYTES - queued, 0) // self.block_bytes

    def put(self, keys: Sequence[bytes], depth: int, stamp: int, data: Bytes) -> int:
        """Store consecutive blocks of one request; none of them is there.

        Args:
            keys: of n blocks, at most `room`.
            depth: blocks of the request before them.
            stamp: the request's (`begin`).
            data: [n, block_bytes], the store's from now on.

        Returns:
            The leading blocks taken; fewer than n where the store is full of blocks as recent.
        """
        self._settle()
        slots: list[int] = []
        try:
            for _ in keys:
                slots.append(self.index.take_slot(stamp))
        except StoreFullError:
            pass
        if not slots:
            return 0
        taken = list(keys[: len(slots)])
        depths = list(range(depth, depth + len(slots)))
        anew = None
        if self._records > _RECORDS_PER_BLOCK * (len(self.index) + len(slots)) + 1024:
            anew, self._records = self.index.items(), len(self.index)
        self._records += len(slots)
        written = self._submit(self._write, taken, slots, depths, stamp, data[: len(slots)], anew)
        self._batches.append(_Batch(taken, slots, depths, stamp, data.nbytes, written))
        self._coming.update(taken)
        return len(slots)

    def _write(
        self,
        keys: list[bytes],
        slots: list[int],
        depths: list[int],
        stamp: int,
        data: Bytes,
        anew: list[tuple[bytes, Entry]] | None,
    ) -> list[int]:
        """In the background: data, then records."""
        end = max(slots) * self.block_bytes
        if end > self.nbytes:
            self._folder.make_room(self._part, end)
        for slot, block in zip(slots, data, strict=True):
            _write_all(self._data, block, (slot - 1) * self.block_bytes)
        os.fdatasync(self._data)
        if anew is not None:
            journal.write_anew(self._journal, anew)
        crcs = [_checksum(key, block) for key, block in zip(keys, data, strict=True)]
        entries = map(Entry, slots, depths, [stamp] * len(slots), crcs)
        with self._journal.open("ab") as file:
            file.write(b"".join(map(journal.pack, keys, entries)))
            file.flush()
            os.fdatasync(file.fileno())
        return crcs

    def _settle(self, wait: bool = False) -> None:
        """What has been written can be found."""
        while self._batches and (wait or self._batches[0].written.done()):
            batch = self._batches.popleft()
            self._coming.difference_update(batch.keys)
            try:
                crcs = batch.written.result()
            except Exception as error:
                self._stop(error)
                for slot in batch.slots:
                    self.index.give_slot(slot)
                continue
            for key, slot, depth, crc in zip(
                batch.keys, batch.slots, batch.depths, crcs, strict=True
            ):
                self.index.add(key, Entry(slot, depth, batch.stamp, crc))
            self.totals.stored_blocks += len(crcs)

    def _stop(self, error: Exception) -> None:
        if self.problem is None:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.problem = f"{self._part}: {reason}"
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
        self.index.touch(keys, stamp)

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


def _checksum(key: bytes, block: Bytes) -> int:
    return zlib.crc32(block.data, zlib.crc32(key))


def _write_all(fd: int, data: Bytes, offset: int) -> None:
    view = data.data
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
