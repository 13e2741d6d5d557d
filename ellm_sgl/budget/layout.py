"""The ledger's bytes: a header, and a row of the same size for each process.

```
 0      16     20     24     32      36          128
 magic  version  rows  budget  crc32   zeros       │ row 0 │ row 1 │ …        little-endian
 row:  pid  port  floor  want  share  committed  (u64 each)  label (64)  crc32  zeros
```

A row lies within a page and is written in one go: a process that is killed in the middle of
writing leaves the row before or the row after. A row of zeros is free.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

MAGIC = b"ellm-sgl budget\0"
VERSION = 1
ROWS = 63
"""Most servers of one budget."""
SLOT = 128
"""Bytes of the header, and of a row."""
SIZE = SLOT * (1 + ROWS)

_HEADER = struct.Struct("<16sIIQ")
_ROW = struct.Struct("<6Q64s")
_CRC = struct.Struct("<I")
_FREE = bytes(SLOT)
MOST_BYTES = 2**63 - 1


class CorruptError(ValueError):
    """Bytes that no ellm-sgl has written."""


class VersionError(ValueError):
    """Bytes that another version of ellm-sgl has written; the argument is its number."""


@dataclass(frozen=True)
class Row:
    """One server: the process that decides for it, and its memory in bytes."""

    pid: int
    """As the server itself sees it: in a container another than outside."""
    port: int
    label: str
    floor: int
    want: int = 0
    share: int = 0
    """What it may have, as whoever wrote last has reckoned."""
    committed: int = 0
    """What it has debited: it has no more than that."""


def pack_header(budget: int) -> bytes:
    return _sealed(_HEADER.pack(MAGIC, VERSION, ROWS, budget))


def unpack_header(data: bytes) -> int | None:
    """The budget in bytes; None where none has been written yet.

    Raises:
        VersionError, CorruptError: what the names say.
    """
    if not any(data):
        return None
    magic, version, rows, budget = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptError("no ledger")
    if version != VERSION:
        raise VersionError(version)
    if rows != ROWS or not _is_sealed(data, _HEADER.size):
        raise CorruptError("header")
    return int(budget)


def pack_row(row: Row | None) -> bytes:
    if row is None:
        return _FREE
    numbers = row.pid, row.port, row.floor, row.want, row.share, row.committed
    label = row.label.encode()[:64].decode(errors="ignore").encode()
    return _sealed(_ROW.pack(*numbers, label))


def unpack_row(data: bytes) -> Row | None:
    """None where the row is free.

    Raises:
        CorruptError: what the name says.
    """
    if data == _FREE:
        return None
    if not _is_sealed(data, _ROW.size):
        raise CorruptError("row")
    pid, port, floor, want, share, committed, label = _ROW.unpack_from(data)
    text = label.rstrip(b"\0").decode(errors="replace")
    return Row(pid, port, text, floor, want, share, committed)


def _sealed(data: bytes) -> bytes:
    return (data + _CRC.pack(zlib.crc32(data))).ljust(SLOT, b"\0")


def _is_sealed(data: bytes, length: int) -> bool:
    return data == _sealed(data[:length])
