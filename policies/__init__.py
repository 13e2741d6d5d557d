"""Policies: how much of each request stays cached. No torch, no SGLang in here."""

from ellm_sgl.policies.base import Policy, RequestView, SystemState
from ellm_sgl.policies.fixed_ratio import FixedRatio

__all__ = ["FixedRatio", "Policy", "RequestView", "SystemState"]
