"""Units, page table and physical pool: where each piece of KV is. No SGLang in here."""

from ellm_sgl.memory.elastic import ElasticMemory
from ellm_sgl.memory.host_tier import HostTier
from ellm_sgl.memory.page_table import IntegrityError, OutOfBlocksError, PageTable
from ellm_sgl.memory.pool import HiddenPool, KVPool
from ellm_sgl.memory.shape import NONE, PoolShape, PoolStatistics
from ellm_sgl.memory.totals import Totals

__all__ = [
    "NONE",
    "ElasticMemory",
    "HiddenPool",
    "HostTier",
    "IntegrityError",
    "KVPool",
    "OutOfBlocksError",
    "PageTable",
    "PoolShape",
    "PoolStatistics",
    "Totals",
]
