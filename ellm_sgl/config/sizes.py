"""Sizes of memory, as operators write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ellm_sgl.config.ranges import shown

MOST_BYTES = 2**62
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(iB|B)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class MemoryBudget:
    """What servers of one machine share."""

    name: str
    nbytes: int


def read_size(text: str) -> int:
    """Bytes: "8589934592", "8GiB" or "8G" (1024 each), "8GB" (1000 each).

    Raises:
        ValueError: it is none, or not between 1 and 2 ** 62.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{shown(text)} is no size such as 512MiB or 16GiB")
    number, letter, ending = found.groups()
    base = 1000 if ending == "B" else 1024
    nbytes = float(number) * base ** " KMGT".index(letter or " ")
    if not 1 <= nbytes <= MOST_BYTES:
        raise ValueError(f"{shown(text)} is no size from 1 byte up to {MOST_BYTES:,}")
    return int(nbytes)


def read_budget(text: str) -> MemoryBudget:
    """NAME:SIZE.

    Raises:
        ValueError: it is none.
    """
    name, colon, size = text.rpartition(":")
    if not colon or not _NAME.fullmatch(name):
        raise ValueError(
            f"{shown(text)} is not NAME:SIZE, the name of letters, digits, dots, dashes and "
            "underscores"
        )
    return MemoryBudget(name, read_size(size))
