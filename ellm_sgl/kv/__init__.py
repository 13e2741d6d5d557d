"""Units, page table and physical pool: where each piece of KV is. No SGLang in here."""

from ellm_sgl.kv.host import HostTier
from ellm_sgl.kv.page_table import IntegrityError, OutOfBlocksError, PageTable
from ellm_sgl.kv.pool import HiddenPool, KVPool
from ellm_sgl.kv.shape import NONE, PoolShape, PoolStatistics

__all__ = [
    "NONE",
    "HiddenPool",
    "HostTier",
    "IntegrityError",
    "KVPool",
    "OutOfBlocksError",
    "PageTable",
    "PoolShape",
    "PoolStatistics",
]
