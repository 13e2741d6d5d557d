"""From page table to rows: the step plan, and the rows' way through the model."""

from ellm_sgl.forward.device_streamer import DeviceStreamer
from ellm_sgl.forward.hidden import Capture, HiddenStates, plan_capture
from ellm_sgl.forward.native_streamer import NativeStreamer
from ellm_sgl.forward.plan import NewTokens, StepPlan, plan_step
from ellm_sgl.forward.restoration import (
    GroupTransfer,
    Missing,
    Restoration,
    plan_restoration,
)
from ellm_sgl.forward.rows import MixedRows
from ellm_sgl.forward.separate import SeparateRows
from ellm_sgl.forward.streamer import Streamer

AnyStreamer = NativeStreamer | Streamer | DeviceStreamer
"""What fetches units from the host tier."""

__all__ = [
    "AnyStreamer",
    "Capture",
    "DeviceStreamer",
    "GroupTransfer",
    "HiddenStates",
    "Missing",
    "MixedRows",
    "NativeStreamer",
    "NewTokens",
    "Restoration",
    "SeparateRows",
    "StepPlan",
    "Streamer",
    "plan_capture",
    "plan_restoration",
    "plan_step",
]
