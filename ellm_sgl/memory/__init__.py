"""Units, page table and physical pool: where each piece of KV is. No SGLang in here."""

from ellm_sgl.memory.admission import AdmissionRoom
from ellm_sgl.memory.arena import Arena, CpuArena
from ellm_sgl.memory.elastic import ElasticMemory
from ellm_sgl.memory.page_table import IntegrityError, OutOfBlocksError, PageTable
from ellm_sgl.memory.pool import HiddenPool, KVPool
from ellm_sgl.memory.prompt_room import NOTHING_UNDER_WAY, PromptRoom, UnderWay
from ellm_sgl.memory.resize import Outcome, Resizer
from ellm_sgl.memory.shape import NONE, PoolShape
from ellm_sgl.memory.sizer import Alone, Ask, Load, Report, Sizer, Sizes

__all__ = [
    "NONE",
    "NOTHING_UNDER_WAY",
    "AdmissionRoom",
    "Alone",
    "Arena",
    "Ask",
    "CpuArena",
    "ElasticMemory",
    "HiddenPool",
    "IntegrityError",
    "KVPool",
    "Load",
    "OutOfBlocksError",
    "Outcome",
    "PageTable",
    "PoolShape",
    "PromptRoom",
    "Report",
    "Resizer",
    "Sizer",
    "Sizes",
    "UnderWay",
]
