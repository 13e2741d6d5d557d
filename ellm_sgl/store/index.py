"""Which block is in which slot, and which one goes when there is no other room.

A block is of use only while all blocks before it are there. So all blocks that a request touches
get the same stamp, and of equal stamps the one furthest from the beginning goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class StoreFullError(RuntimeError):
    """There is no slot but those of blocks that are as recent, or being written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a block is. Slots begin with 1."""

    slot: int
    depth: int
    """Blocks before it."""
    stamp: int
    """When it was used last; larger is later."""
    crc: int
    """CRC-32 of its key and its data."""


class Index:
    """Blocks by key.

    Args:
        capacity: slots.
        entries: blocks that are there, each in a slot of its own, none beyond `capacity`.
    """

    def __init__(self, capacity: int, entries: Mapping[bytes, Entry]) -> None:
        self.capacity = capacity
        self._entries = dict(entries)
        taken = {e.slot for e in self._entries.values()}
        self._next = max(taken, default=0) + 1
        """Slots from here on have never been given."""
        self._returned = sorted(set(range(1, self._next)) - taken)
        """A heap of the free ones before it."""
        self._queue: list[tuple[int, int, bytes]] = []
        self._rebuild()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    @property
    def highest_stamp(self) -> int:
        return max((e.stamp for e in self._entries.values()), default=0)

    def take_slot(self, stamp: int) -> int:
        """A slot for a block of this stamp; the least recent block makes way.

        Raises:
            StoreFullError: all blocks are as recent.
        """
        if not self._returned and self._next > self.capacity:
            oldest = self._oldest()
            if oldest is None or self._entries[oldest].stamp >= stamp:
                raise StoreFullError(f"{self.capacity} slots, all of blocks as recent")
            self.drop(oldest)
        if self._returned:
            return heapq.heappop(self._returned)
        self._next += 1
        return self._next - 1

    def give_slot(self, slot: int) -> None:
        """A slot that `take_slot` gave is not needed."""
        heapq.heappush(self._returned, slot)

    def add(self, key: bytes, entry: Entry) -> None:
        """A block is there, in a slot that `take_slot` gave."""
        assert key not in self._entries
        self._entries[key] = entry
        self._enqueue(key, entry)

    def drop(self, key: bytes) -> None:
        """A block is there no more."""
        self.give_slot(self._entries.pop(key).slot)

    def touch(self, keys: Sequence[bytes], stamp: int) -> list[tuple[bytes, Entry]]:
        """These blocks have been used. Returns those of which that is news."""
        news = []
        for key in keys:
            old = self._entries.get(key)
            if old is not None and old.stamp < stamp:
                self._entries[key] = new = Entry(old.slot, old.depth, stamp, old.crc)
                self._enqueue(key, new)
                news.append((key, new))
        return news

    def _enqueue(self, key: bytes, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.stamp, -entry.depth, key))
        if len(self._queue) > 2 * len(self._entries) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        self._queue = [(e.stamp, -e.depth, key) for key, e in self._entries.items()]
        heapq.heapify(self._queue)

    def _oldest(self) -> bytes | None:
        """The block to go first; what the queue says of blocks used since is passed over."""
        while self._queue:
            stamp, _, key = self._queue[0]
            entry = self._entries.get(key)
            if entry is not None and entry.stamp == stamp:
                return key
            heapq.heappop(self._queue)
        return None
