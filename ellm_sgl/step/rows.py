"""Takes recomputed rows through the model beside SGLang's own rows.

The rows join at the decoder stack's input and leave inside the last layer that needs them: its
attention has their K and V, and returns no output for them. At the latest they leave before the
final norm. What SGLang sees before and after is exactly its own batch:
its `ForwardBatch`, logits processor and sampler never learn of the extra rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ellm_sgl.memory import PoolShape
from ellm_sgl.step.plan import StepPlan

Hook = Callable[..., Any]
"""A forward pre-hook that is given the step's plan before its other arguments."""


class MixedRows:
    """Hooks on a decoder stack, only while a step recomputes rows: a module with hooks takes
    PyTorch's slow way through `__call__`.

    Args:
        decoder: an `nn.Module` called as `decoder(input_ids, positions, ...)` whose `layers` are
            called with the rows' tensors as arguments and whose `norm` is called last. Each layer
            calls `post_attention_layernorm(attention output, residual)`.
        shape: layer groups of the pool.
    """

    def __init__(self, decoder: Any, shape: PoolShape) -> None:
        self._with_kwargs: list[tuple[nn.Module, Hook]] = [
            (decoder, _append_rows),
            *((layer, _keep_rows(shape.group_of(i))) for i, layer in enumerate(decoder.layers)),
            (decoder.norm, _keep_rows(shape.num_groups)),
        ]
        self._plain = [layer.post_attention_layernorm for layer in decoder.layers]

    @contextmanager
    def running(self, plan: StepPlan) -> Iterator[None]:
        """The forward pass inside this context computes `plan`'s recomputed rows too."""
        if not plan.recomputed_rows:
            yield
            return
        with ExitStack() as hooks:
            for module, hook in self._with_kwargs:
                bound = partial(hook, plan)
                hooks.callback(module.register_forward_pre_hook(bound, with_kwargs=True).remove)
            for module in self._plain:
                hooks.callback(module.register_forward_pre_hook(_match_rows).remove)
            yield


def _append_rows(plan: StepPlan, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    input_ids, positions, *rest = args
    input_ids = torch.cat([input_ids, plan.recomputed_token_ids.to(input_ids.dtype)])
    positions = torch.cat([positions, plan.recomputed_positions.to(positions.dtype)])
    return (input_ids, positions, *rest), kwargs


def _keep_rows(group: int) -> Hook:
    """A pre-hook that cuts every tensor argument to the rows alive in `group`."""

    def hook(plan: StepPlan, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        rows = plan.rows_in(group)
        return tuple(_cut(a, rows) for a in args), {k: _cut(a, rows) for k, a in kwargs.items()}

    return hook


def _match_rows(_: nn.Module, args: Any) -> Any:
    """A pre-hook that cuts the residual to the rows for which attention gave an output."""
    hidden_states, *residual = args
    return (hidden_states, *(_cut(r, hidden_states.shape[0]) for r in residual))


def _cut(value: Any, rows: int) -> Any:
    return value[:rows] if isinstance(value, torch.Tensor) and value.shape[0] > rows else value
