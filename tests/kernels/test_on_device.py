"""What carries attention inputs to a device leaves nothing behind."""

from __future__ import annotations

import torch

from tests.kernels.cpu_steps import F32, Sizes, make
from tests.kernels.on_device import moved


def test_a_step_is_moved_as_a_whole() -> None:
    inputs = make(Sizes(((40, 1), (9, 4)), 16, 1, 2, 32, F32, F32, 0.5))
    there = moved(inputs, torch.device("meta"))
    step = there.layout.stacked
    indices = step.units, step.write_rows, step.write_units, step.write_offsets
    assert all(x.is_meta for x in (there.q, there.k, there.v, there.keys, there.values, *indices))
    assert step.requests == inputs.layout.requests and type(there.layout) is type(inputs.layout)
