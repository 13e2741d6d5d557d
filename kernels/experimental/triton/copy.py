"""Copies units between pinned host memory and the device from inside a CUDA graph.

A copy that the driver makes has its addresses and sizes in the graph. This kernel reads them from
the device, so what a replay copies is whatever it was last told. It reads host memory over the bus
itself: some programs ask for enough at a time to fill it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 32
"""With `BLOCK` they have half a megabyte under way, several times what a bus of 64 GB/s delivers in
the microseconds that an answer takes; the other processors are the layers'."""
BLOCK = 2048
"""Elements of 8 bytes that a program copies at a time: four loads of 16 bytes for each thread."""
WARPS = 8


@triton.jit(do_not_specialize_on_alignment=["targets", "sources", "count"])
def copy_parts(
    target, source, targets, sources, count,
    UNIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Part by part, unit after unit, every n-th part of all."""
    element = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), tl.load(count) * PARTS, tl.num_programs(0)):
        at = i // PARTS
        place = (i % PARTS) * BLOCK + element
        of = tl.load(sources + at) * UNIT + place
        to = tl.load(targets + at) * UNIT + place
        inside = place < UNIT
        # Not through the first-level cache, which knows nothing of copies that others make.
        value = tl.load(source + of, mask=inside, cache_modifier=".cg")
        tl.store(target + to, value, mask=inside)


def copy_listed(
    target: torch.Tensor,
    source: torch.Tensor,
    targets: torch.Tensor,
    sources: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Copy the first `count` units listed.

    Args:
        target, source: `[units, ...]`, contiguous, of the same unit shape, a multiple of 8 bytes;
            memory that the device can read or write (the host's has to be pinned).
        targets, sources: int64 [most], units, on the device.
        count: int64 [1], on the device.
    """
    to, of = (buffer.view(len(buffer), -1).view(torch.int64) for buffer in (target, source))
    unit = to.shape[1]
    copy_parts[(PROGRAMS,)](
        to, of, targets, sources, count,
        UNIT=unit, PARTS=triton.cdiv(unit, BLOCK), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
