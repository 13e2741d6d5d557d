"""The records: for each slot, which block is in it, in place and with a checksum of its own.

A record is written after its block's data has reached the disk. What a crash leaves half written is
found by checksums: a record's own, and the one in it of key and data.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from ellm_sgl.store.chain import KEY_BYTES
from ellm_sgl.store.index import Entry

_BODY = struct.Struct(f"<{KEY_BYTES}sIQI")
"""Key, depth, stamp, checksum of the block."""
_CRC = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CRC.size


def pack(key: bytes, entry: Entry) -> bytes:
    """The record of one block."""
    body = _BODY.pack(key, entry.depth, entry.stamp, entry.crc)
    return body + _CRC.pack(zlib.crc32(body))


def read(path: Path) -> dict[bytes, Entry]:
    """The blocks that the records tell of; where two slots have one, in that used later.

    Damaged records, and a torn one at the end, are passed over.
    """
    found: dict[bytes, Entry] = {}
    data = path.read_bytes()
    for slot in range(1, len(data) // RECORD_BYTES + 1):
        record = data[(slot - 1) * RECORD_BYTES : slot * RECORD_BYTES]
        body, (crc,) = record[: _BODY.size], _CRC.unpack(record[_BODY.size :])
        if zlib.crc32(body) == crc:
            key, depth, stamp, block = _BODY.unpack(body)
            if key not in found or found[key].stamp < stamp:
                found[key] = Entry(slot, depth, stamp, block)
    return found
