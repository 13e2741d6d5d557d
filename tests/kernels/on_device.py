"""Attention inputs on another device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ellm_sgl.kernels import reference
from tests.kernels.cpu_steps import Inputs

CUDA = torch.device("cuda")


def moved(value: Any, device: torch.device = CUDA) -> Any:
    """`value` with every tensor in it, and in the (named) tuples and dataclasses in it, on
    `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{n: moved(v, device) for n, v in fields.items()})
    return value


def check_on_device(inputs: Inputs, kernel: Any, tolerance: float, **options: Any) -> torch.Tensor:
    """`kernel` on the device agrees with the reference on the CPU.

    Returns:
        What it computed, still on the device.
    """
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    out, *pool = moved(inputs).run(kernel, **options)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(
        [x.cpu() for x in pool], expected_pool, rtol=0, atol=0, equal_nan=True
    )
    assert isinstance(out, torch.Tensor)
    return out
