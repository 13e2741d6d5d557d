"""Policies: who runs, how much of each request stays cached, how a step is divided.

No torch, no SGLang in here. This module has what authors of policies need; to test one, see
`ellm_sgl.policies.testing`. A folder of a built-in policy exports the policy, the rest is private.
"""

from ellm_sgl.policies.base import (
    Batch,
    EndedRequest,
    Growth,
    MemoryState,
    Policy,
    Ratios,
    Requests,
    StepReport,
    SystemState,
    WorkSplit,
)
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.fixed_ratio import FixedRatio
from ellm_sgl.policies.planned import evictable_tokens
from ellm_sgl.policies.stock import Stock
from ellm_sgl.policies.work_split import plan_split

__all__ = [
    "Batch",
    "EndedRequest",
    "Fcfs",
    "FixedRatio",
    "Growth",
    "MemoryState",
    "Policy",
    "Ratios",
    "Requests",
    "StepReport",
    "Stock",
    "SystemState",
    "WorkSplit",
    "evictable_tokens",
    "plan_split",
]
