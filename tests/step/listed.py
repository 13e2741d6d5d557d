"""What `kernels.experimental.triton.copy` does, by PyTorch."""

from __future__ import annotations

import torch

from ellm_sgl.kernels.torch_paged import copy_units


def copy_listed(
    target: torch.Tensor,
    source: torch.Tensor,
    targets: torch.Tensor,
    sources: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """See `triton.copy.copy_listed`; on tensors of the host."""
    copy_units(target, targets[: int(count)], source, sources[: int(count)])
