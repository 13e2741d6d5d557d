"""Policies: who runs, how much of each request stays cached, how a step is divided.

No torch, no SGLang in here.
"""

from ellm_sgl.policies.base import (
    Batch,
    MemoryState,
    Policy,
    Ratios,
    Requests,
    StepReport,
    SystemState,
    Threads,
)
from ellm_sgl.policies.fcfs import Fcfs
from ellm_sgl.policies.fixed_ratio import FixedRatio
from ellm_sgl.policies.stock import Stock

__all__ = [
    "Batch",
    "Fcfs",
    "FixedRatio",
    "MemoryState",
    "Policy",
    "Ratios",
    "Requests",
    "StepReport",
    "Stock",
    "SystemState",
    "Threads",
]
