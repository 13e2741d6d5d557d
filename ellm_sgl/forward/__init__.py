"""From page table to rows: the step plan, and the rows' way through the model."""

from ellm_sgl.forward.plan import NewTokens, StepPlan, plan_step
from ellm_sgl.forward.rows import MixedRows

__all__ = ["MixedRows", "NewTokens", "StepPlan", "plan_step"]
