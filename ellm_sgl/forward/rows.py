"""Takes span rows through the model beside SGLang's own rows.

The rows join at the decoder stack's input and leave inside the last layer that needs them: its
attention has their K and V, and returns no output for them. At the latest they leave before the
final norm. What SGLang sees before and after is exactly its own batch:
its `ForwardBatch`, logits processor and sampler never learn of the extra rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ellm_sgl.forward.plan import StepPlan
from ellm_sgl.kv import PoolShape


class MixedRows:
    """Installs forward pre-hooks on a decoder stack; inert while no plan with spans is active.

    Args:
        decoder: a module called as `decoder(input_ids, positions, ...)` whose `layers` are
            called with the rows' tensors as arguments and whose `norm` is called last. Each layer
            calls `post_attention_layernorm(attention output, residual)`.
        shape: layer groups of the pool.
    """

    def __init__(self, decoder: nn.Module, shape: PoolShape) -> None:
        self._plan: StepPlan | None = None
        decoder.register_forward_pre_hook(self._append_rows, with_kwargs=True)
        for index, layer in enumerate(_layers(decoder)):
            group = shape.group_of(index)
            layer.register_forward_pre_hook(self._keep_rows(group), with_kwargs=True)
            after_attention = layer.post_attention_layernorm
            assert isinstance(after_attention, nn.Module)
            after_attention.register_forward_pre_hook(self._match_rows)
        norm = decoder.norm
        assert isinstance(norm, nn.Module)
        norm.register_forward_pre_hook(self._keep_rows(shape.num_groups), with_kwargs=True)

    @contextmanager
    def running(self, plan: StepPlan) -> Iterator[None]:
        """The forward pass inside this context computes `plan`'s span rows too."""
        self._plan = plan if plan.span_rows else None
        try:
            yield
        finally:
            self._plan = None

    def _append_rows(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if (plan := self._plan) is None:
            return None
        input_ids, positions, *rest = args
        input_ids = torch.cat([input_ids, plan.span_token_ids.to(input_ids.dtype)])
        positions = torch.cat([positions, plan.span_positions.to(positions.dtype)])
        return (input_ids, positions, *rest), kwargs

    def _keep_rows(self, group: int) -> Any:
        """A pre-hook that cuts every tensor argument to the rows alive in `group`."""

        def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if (plan := self._plan) is None:
                return None
            rows = plan.rows_in(group)
            return tuple(_cut(a, rows) for a in args), {k: _cut(a, rows) for k, a in kwargs.items()}

        return hook

    def _match_rows(self, _: nn.Module, args: Any) -> Any:
        """A pre-hook that cuts the residual to the rows for which attention gave an output."""
        if self._plan is None:
            return None
        hidden_states, *residual = args
        return (hidden_states, *(_cut(r, hidden_states.shape[0]) for r in residual))


def _layers(decoder: nn.Module) -> list[nn.Module]:
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def _cut(value: Any, rows: int) -> Any:
    return value[:rows] if isinstance(value, torch.Tensor) and value.shape[0] > rows else value
