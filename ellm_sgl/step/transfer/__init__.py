"""What copies units between the host tier and the device: from a thread of the C++ library, from a
Python thread, or on a CUDA stream."""

from ellm_sgl.step.transfer.cuda import DeviceStreamer
from ellm_sgl.step.transfer.graph import GraphFetch
from ellm_sgl.step.transfer.native import NativeStreamer
from ellm_sgl.step.transfer.python import Streamer

AnyStreamer = NativeStreamer | Streamer | DeviceStreamer
"""What fetches units from the host tier."""

__all__ = ["AnyStreamer", "DeviceStreamer", "GraphFetch", "NativeStreamer", "Streamer"]
