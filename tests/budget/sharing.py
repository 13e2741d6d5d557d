"""A process that takes and gives back what it can of a budget: `sharing.py FOLDER FILE SEED`.

It writes what it has into FILE, 8 bytes, as a server's memory has it: after each debit, and before
each credit.
"""

from __future__ import annotations

import mmap
import random
import struct
import sys
import time
from pathlib import Path

from ellm_sgl.budget import Member

BUDGET = 1_000_000
FLOOR = 50_000


def share_in(folder: Path, holding: mmap.mmap, seed: int) -> None:
    rng = random.Random(seed)
    member = Member("test", BUDGET, f"server {seed}", FLOOR, folder=folder)
    held = 0
    print("joined", flush=True)
    while True:
        standing = member.follow(rng.randrange(4) * BUDGET // 4)  # often what it was
        assert standing.committed == held
        if held > standing.share:
            held, given = standing.share, held - standing.share
            holding[:8] = struct.pack("<Q", held)
            member.credit(given)
        elif member.debit(step := rng.randrange(BUDGET // 4)):
            held += step
            holding[:8] = struct.pack("<Q", held)
        time.sleep(rng.random() * 0.004)


if __name__ == "__main__":
    with open(sys.argv[2], "r+b") as file:
        share_in(Path(sys.argv[1]), mmap.mmap(file.fileno(), 8), int(sys.argv[3]))
