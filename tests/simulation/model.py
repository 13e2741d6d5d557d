"""The model: a decoder that computes stamps, and an attention that checks all that it reads.

It is built like SGLang's decoders where eLLM touches them; `MixedRows` and `Projections` are eLLM's
own. What a row is given at layer l is the stamp of layer l; its K is that stamp plus its position,
its V the negative of the stamp. Attention reads K and V of every earlier token, as
`kernels/reference.py` does, and none may differ from the stamps of the request's tokens: so the
next layer's stamps are right if these were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ellm_sgl.kernels.layout import GroupLayout, RowRange
from ellm_sgl.step import StepPlan
from tests.simulation.stamps import POISON, Stamps, Transcript, stamps

if TYPE_CHECKING:
    from tests.simulation.plane import Plane


class WrongKV(AssertionError):  # noqa: N818 (what it is, not what it does)
    """Attention read something else than the model would have written there."""


class WrongRows(AssertionError):  # noqa: N818
    """The rows of a step are not the tokens that they should be."""


class StampDecoder(nn.Module):
    """`decoder(input_ids, positions, step)` computes a step."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, range(layers)))
        self.norm = _Norm()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: ForwardPass
    ) -> torch.Tensor:
        context = step.embed(input_ids, positions)
        hidden = stamps(context, 0)[:, None]
        for layer in self.layers:
            hidden, context = layer(positions, hidden, step, context)
        hidden, _ = self.norm(hidden, context)
        return hidden


class _Norm(nn.Module):
    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(hidden) != len(residual):
            raise WrongRows(f"{len(hidden)} rows leave a layer, with {len(residual)} residuals")
        return hidden, residual


class _Projection(nn.Module):
    """Q, K and V of a stamp x: x, x and -x."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.tensor([[1.0], [1.0], [-1.0]], dtype=torch.float64)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight[:, 0]


class _Attention(nn.Module):
    q_size = kv_size = head_dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = _Projection()

    def rotary_emb(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k + positions[:, None]


class _Layer(nn.Module):
    """`residual` is the hash of each row's tokens: what the layers below have made of them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = _Attention()
        self.post_attention_layernorm = _Norm()

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        step: ForwardPass,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.self_attn.qkv_proj(hidden).split(1, dim=1)
        _, k = self.self_attn.rotary_emb(positions, q, k)
        attended = step.attend(self.index, k[:, 0], v[:, 0], residual)
        attended, residual = self.post_attention_layernorm(attended, residual)
        if not torch.equal(attended, residual):
            raise WrongRows(f"layer {self.index}: residuals are not those of the rows")
        return stamps(residual, self.index + 1)[:, None], residual


class ForwardPass:
    """One step under its plan.

    Args:
        plane: memory to compute in.
        plan: of the step.
        transcripts: of its requests, in order.
    """

    def __init__(self, plane: Plane, plan: StepPlan, transcripts: list[Transcript]) -> None:
        self._plane = plane
        self._plan = plan
        self._transcripts = transcripts
        self._streamer: Any = None
        """As of when the step begins."""

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The hash of each row's tokens, after a check that it is the right token in its place."""
        self._streamer = self._plane.streamer_of(self._plan)
        rows = self._plan.groups[0].rows
        owner, place = np.full(rows, -1), np.full(rows, -1)
        for i, request in enumerate(self._plan.groups[0].requests):
            for part in (request.new, *request.spans):
                owner[part.row : part.end_row] = i
                place[part.row : part.end_row] = np.arange(part.position, part.end_position)
        if len(input_ids) != rows or not np.array_equal(positions.numpy(), place):
            raise WrongRows(f"positions {positions.tolist()}, planned: {place.tolist()}")
        hashes = np.empty(rows, np.int64)
        for row, (i, position, token) in enumerate(
            zip(owner.tolist(), place.tolist(), input_ids.tolist(), strict=True)
        ):
            transcript = self._transcripts[i]
            if transcript.tokens[position] != token:
                raise WrongRows(
                    f"row {row} is token {token}, request {i} has {transcript.tokens[position]} "
                    f"at {position}"
                )
            hashes[row] = transcript.hashes(position + 1)[position]
        return torch.from_numpy(hashes)

    def attend(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        """As `EllmAttention.forward_decode`; what a row has attended to is its context."""
        shape, streamer = self._plane.pool.shape, self._streamer
        group, ends = shape.group_of(layer), shape.ends_group(layer)
        if streamer is not None and layer % shape.layer_group == 0:
            streamer.wait(group)
        reading = _Reading(layer, self._plan.groups[group], self._transcripts)
        rows = k.numpy(), v.numpy()
        self._plane.compute(lambda: reading.check(*self._plane.kv_of(layer), *rows))
        if streamer is not None and ends:
            streamer.done(group)
        return context[: self._plan.rows_in(group + ends)]


class _Reading:
    """One layer's attention."""

    def __init__(self, layer: int, layout: GroupLayout, transcripts: list[Transcript]) -> None:
        self._layer = layer
        self._layout = layout
        self._units = layout.units.numpy()
        self._transcripts = transcripts

    def check(self, keys: Stamps, values: Stamps, k: Stamps, v: Stamps) -> None:
        """Write the rows' K and V, then read all tokens'.

        Args:
            keys, values: [units + 1, block_tokens] of the pool.
            k, v: [rows].

        Raises:
            WrongKV: naming the first token whose KV is not what it should be.
        """
        layout = self._layout
        rows = layout.write_rows
        write_rows = rows if isinstance(rows, slice) else rows.numpy()
        places = layout.write_units.numpy(), layout.write_offsets.numpy()
        keys[places], values[places] = k[write_rows], v[write_rows]
        all_keys, all_values = keys[self._units], values[self._units]
        for i, request in enumerate(layout.requests):
            end = request.new.end_position
            read_k = all_keys[request.blocks].reshape(-1)[:end]
            read_v = all_values[request.blocks].reshape(-1)[:end]
            own: tuple[RowRange, ...] = request.spans
            if request.unstored_new:
                own = (*own, request.new)
            for part in own:
                read_k[part.position : part.end_position] = k[part.row : part.end_row]
                read_v[part.position : part.end_position] = v[part.row : part.end_row]
            if len(read_k) != end:
                raise WrongKV(f"layer {self._layer}: {len(read_k)} of {end} tokens have a block")
            wanted = self._transcripts[i].stamps(end, self._layer)
            wrong = (read_k != wanted + np.arange(end)) | (read_v != -wanted)
            if wrong.any():
                self._complain(i, int(wrong.argmax()), read_k, keys.shape[1])

    def _complain(self, i: int, position: int, read: Stamps, block_tokens: int) -> None:
        units = self._units[self._layout.requests[i].blocks]
        found = "nothing" if abs(read[position]) == POISON else f"{read[position]:.0f}"
        raise WrongKV(
            f"layer {self._layer}, request {i} of the step: the KV of token {position} of "
            f"{len(read)} is {found} (unit {units[position // block_tokens]})"
        )
