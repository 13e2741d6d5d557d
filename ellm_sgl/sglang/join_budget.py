"""A server's place in a budget, and what its pool begins with there."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from ellm_sgl.budget import LedgerError, Member, hold
from ellm_sgl.budget.file import LedgerFile
from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.memory import KVPool, PageTable, Sizes
from ellm_sgl.memory.sizer import start_units
from ellm_sgl.sglang.sizing import PERIOD_S, Sizing

logger = logging.getLogger(__name__)

SHARE_S, SAY_S, FLOOR_S = 2.0, 10.0, 600.0
"""How long to wait for the share, and for the floor: others give back what they have between two
steps, and one that is about to start once it serves: its calibration, and of a KV store the
fingerprint of all weights, come first. After `SAY_S` the log tells whom it waits for."""


def make_sizing(
    settings: EllmConfig, table: PageTable, pool: KVPool, arguments: Any
) -> Sizing | None:
    """Before anything of the pool has been touched, on all ranks. Where it is shared it shrinks to
    what this server may begin with, and that has been debited.

    Args:
        arguments: SGLang's `ServerArgs`.

    Raises:
        ConfigError: the budget has no place for this server, or its file cannot be used.
    """
    from sglang.srt.distributed import get_tp_group

    if not settings.resizes_itself:
        return None
    group, shape = get_tp_group(), table.shape
    sizes = Sizes(
        lambda units: group.world_size * pool.bytes_behind(units),
        shape.num_groups,
        table.num_units,
    )
    # Whole blocks, as what the pool starts with.
    least = max((settings.min_device_kv_tokens or 0) // shape.block_tokens, 1) * shape.num_groups
    if pool.arena is None:
        given = "memory-budget" if settings.memory_budget is not None else "idle-release-s"
        raise ConfigError(f"--ellm-{given}: only CPU hosts give memory back so far; leave it out")
    if least > table.unit_limit:
        raise ConfigError(
            f"--ellm-min-device-kv-tokens {settings.min_device_kv_tokens}: the pool starts with "
            f"{shape.tokens_in(table.unit_limit)}; give fewer, or more --ellm-device-kv-tokens"
        )
    key = group.broadcast_object(f"ellm_size_{secrets.token_hex(16)}")
    if settings.budget is None:
        return Sizing(settings, key, sizes, least, table.unit_limit, None)
    sizes = sizes.within(settings.budget.nbytes)
    row, start = _join(settings, sizes, least, table.unit_limit, arguments)
    table.limit_units(start)
    pool.decommit(start, table.committed_units)
    table.decommit_units(start)
    return Sizing(settings, key, sizes, least, sizes.most_units, row)


def _join(
    settings: EllmConfig, sizes: Sizes, least: int, wish: int, arguments: Any
) -> tuple[Member | LedgerFile, int]:
    """This server's row, and the units that it begins with, the same on all ranks."""
    from sglang.srt.distributed import get_tp_group

    group, budget = get_tp_group(), settings.budget
    assert budget is not None
    row: Member | None = None
    found = 0, 0
    if group.rank_in_group == 0:
        name = str(arguments.served_model_name or arguments.model_path).rstrip("/").split("/")[-1]
        floor = sizes.bytes_of(least)
        try:
            row = Member(budget.name, budget.nbytes, name, floor, arguments.port)
            found = _debited(row, sizes, least, wish), row.index
        except LedgerError as error:
            raise ConfigError(f"--ellm-memory-budget {settings.memory_budget}: {error}") from None
    start, index = group.broadcast_object(found)
    return row or hold(budget.name, index), start


def _debited(member: Member, sizes: Sizes, least: int, wish: int) -> int:
    """Units that the server begins with; waits for others to give them back."""
    began, told = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        units = start_units(member.publish, sizes, least, wish, patient=waited < SHARE_S)
        if units is not None and member.debit(sizes.bytes_of(units)):
            return units
        if waited > SAY_S and not told:
            told = True
            logger.info(
                "eLLM budget: waiting for %s bytes, this server's floor, of %s",
                f"{sizes.bytes_of(least):,}", member.others(),
            )  # fmt: skip
        if waited > FLOOR_S:
            raise LedgerError(
                f"nobody gave back {sizes.bytes_of(least):,} bytes in {FLOOR_S:g} s, to be this "
                f"server's floor ({member.others()}); end the server that hangs"
            )
        time.sleep(PERIOD_S)
