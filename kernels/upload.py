"""From host arrays to device tensors, without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, np.dtype[Any]], device: str | torch.device) -> torch.Tensor:
    """A copy of `array` on `device`; on the CPU it may share the array's memory.

    To a CUDA device through pinned memory: from other memory the driver would wait until the
    device has done everything before the copy.
    """
    tensor = torch.from_numpy(array)
    if tensor.device == device:
        return tensor
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
