"""What neither the device nor the host has is computed again in every step, until there is a unit
for it. So other blocks of the same requests go to the host, and their units are free for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ellm_sgl.memory.page_table import PageTable
from ellm_sgl.memory.shape import NONE, IntArray

Evictable = Callable[[int], IntArray]
"""Blocks of a request that may leave the device, oldest first."""


def lost_blocks(table: PageTable, seq_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Blocks of each request of which something is neither on the device nor on the host."""
    lost = (np.count_nonzero(table.lost(table.missing_of_each([s]))) for s in seq_ids)
    return np.fromiter(lost, np.int64, len(seq_ids))


def host_room(table: PageTable) -> int:
    """Of how many blocks the host can take copies."""
    groups = table.shape.num_groups - table.host.hidden_groups
    return table.host.spare_units(table.units) // (groups or 1)


def in_exchange(
    table: PageTable,
    seq_ids: Sequence[int],
    lost: npt.NDArray[np.int64],
    room: int,
    evictable: Evictable,
) -> IntArray:
    """Blocks to send to the host for those that these requests have lost.

    Args:
        table: the page table.
        seq_ids: who decodes.
        lost: blocks of each that do not come back without this, int64 [requests].
        room: most blocks to send.
        evictable: of one of these requests.
    """
    sent: list[IntArray] = [np.empty(0, np.int32)]
    for seq_id, count in zip(seq_ids, lost.tolist(), strict=True):
        if room and count:
            blocks = evictable(seq_id)
            sent.append(blocks[_host_completes(table, blocks)][: min(count, room)])
            room -= len(sent[-1])
    return np.concatenate(sent)


def _host_completes(table: PageTable, blocks: IntArray) -> npt.NDArray[np.bool_]:
    """Which of these blocks the host has in whole once their KV is copied. Hidden states are
    captured as they are computed: of a block that got no slot then, the lowest groups would be
    lost."""
    hidden = table.host.units[blocks, : table.host.hidden_groups]
    whole: npt.NDArray[np.bool_] = ~table.misses_units(blocks) & (hidden != NONE).all(axis=1)
    return whole
