"""The journal: a record for each block that was stored, of a fixed size and with its own checksum.

A record is written after its block's data has reached the disk. What a crash leaves half written is
found by checksums: a record's own, and the one in it of key and data.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ellm_sgl.store.chain import KEY_BYTES
from ellm_sgl.store.index import Entry

_BODY = struct.Struct(f"<{KEY_BYTES}sIIQI")
"""Key, slot, depth, stamp, checksum of the block."""
_CRC = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CRC.size


def pack(key: bytes, entry: Entry) -> bytes:
    """The record of one block."""
    body = _BODY.pack(key, entry.slot, entry.depth, entry.stamp, entry.crc)
    return body + _CRC.pack(zlib.crc32(body))


def unpack(record: bytes) -> tuple[bytes, Entry] | None:
    """What a record says; None if it is damaged."""
    body, (crc,) = record[: _BODY.size], _CRC.unpack(record[_BODY.size :])
    if zlib.crc32(body) != crc:
        return None
    key, slot, depth, stamp, block = _BODY.unpack(body)
    return key, Entry(slot, depth, stamp, block)


def read(path: Path, capacity: int) -> list[tuple[bytes, Entry]]:
    """The blocks of a journal, each key and each slot once: later records replace earlier ones.

    Damaged records, a torn one at the end, and slots beyond `capacity` are passed over.
    """
    by_slot: dict[int, tuple[bytes, Entry]] = {}
    slots: dict[bytes, int] = {}
    for key, entry in _records(path):
        if not 1 <= entry.slot <= capacity:
            continue
        if (before := by_slot.pop(entry.slot, None)) is not None:
            del slots[before[0]]
        if (old := slots.pop(key, None)) is not None:
            del by_slot[old]
        by_slot[entry.slot], slots[key] = (key, entry), entry.slot
    return list(by_slot.values())


def _records(path: Path) -> Iterator[tuple[bytes, Entry]]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while len(record := file.read(RECORD_BYTES)) == RECORD_BYTES:
            if (found := unpack(record)) is not None:
                yield found


def write_anew(path: Path, blocks: Iterable[tuple[bytes, Entry]]) -> None:
    """Replace a journal as a whole: readers find the old one or the new one, never a part."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.writelines(pack(*block) for block in blocks)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
