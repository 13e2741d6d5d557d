"""From page table to rows: the step plan, and the rows' way through the model."""

from ellm_sgl.step.executor import Executor
from ellm_sgl.step.hidden import HiddenStates, plan_capture
from ellm_sgl.step.plan import Capture, NewTokens, StepPlan, plan_step
from ellm_sgl.step.planner import Planner, planned_work
from ellm_sgl.step.restoration import GroupTransfer, Missing, Restoration, plan_restoration
from ellm_sgl.step.rows import MixedRows
from ellm_sgl.step.separate import SeparateRows
from ellm_sgl.step.transfer import AnyStreamer, DeviceStreamer, NativeStreamer, Streamer

__all__ = [
    "AnyStreamer",
    "Capture",
    "DeviceStreamer",
    "Executor",
    "GroupTransfer",
    "HiddenStates",
    "Missing",
    "MixedRows",
    "NativeStreamer",
    "NewTokens",
    "Planner",
    "Restoration",
    "SeparateRows",
    "StepPlan",
    "Streamer",
    "plan_capture",
    "plan_restoration",
    "plan_step",
    "planned_work",
]
