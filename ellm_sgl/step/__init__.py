"""From page table to rows: the step plan, and the rows' way through the model."""

from ellm_sgl.step.executor import Executor
from ellm_sgl.step.hidden import HiddenStates
from ellm_sgl.step.plan import NewTokens, StepPlan, plan_step
from ellm_sgl.step.planner import Planner, planned_work
from ellm_sgl.step.restoration import Missing, plan_restoration
from ellm_sgl.step.transfer import AnyStreamer, DeviceStreamer, NativeStreamer, Streamer

__all__ = [
    "AnyStreamer",
    "DeviceStreamer",
    "Executor",
    "HiddenStates",
    "Missing",
    "NativeStreamer",
    "NewTokens",
    "Planner",
    "StepPlan",
    "Streamer",
    "plan_restoration",
    "plan_step",
    "planned_work",
]
