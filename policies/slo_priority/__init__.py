"""Service level objectives by priority."""

from ellm_sgl.policies.slo_priority.policy import SloPriority

__all__ = ["SloPriority"]
