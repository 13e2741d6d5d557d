"""Attention over the paged pool with PyTorch's own kernels. Runs on any device."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange


def mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: GroupLayout,
    scale: float,
    out_rows: int | None = None,
    delta: float = 0.5,
) -> torch.Tensor:
    """See `reference.mixed_attention`: same arguments, same result, one request at a time."""
    write = layout.write_units, layout.write_offsets
    keys[write] = k[layout.write_rows].to(keys.dtype)
    values[write] = v[layout.write_rows].to(values.dtype)
    stored_k, stored_v = keys[layout.units], values[layout.units]
    out = torch.empty_like(q[:out_rows])
    for request in layout.requests:
        all_k = _tokens(request, stored_k, k, q.dtype)
        all_v = _tokens(request, stored_v, v, q.dtype)
        _attend(q, all_k, all_v, request.new, out, scale)
        for span in request.spans:
            if span.row < len(out):
                _attend(q, all_k, all_v, span, out, scale)
    return out


def copy_units(
    target: torch.Tensor,
    target_units: torch.Tensor,
    source: torch.Tensor,
    source_units: torch.Tensor,
) -> None:
    """Copy unit `source_units[i]` of `source` to unit `target_units[i]` of `target`, for all i.

    Args:
        target, source: [units, ...], on the same device.
        target_units, source_units: int64 [n].
    """
    target[target_units] = source[source_units]


def _tokens(
    request: RequestLayout, stored: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """K or V of all tokens of a request, [kv_heads, tokens, head_dim].

    `stored` is this step's own copy of the blocks, so recomputed rows are laid into it.
    """
    tokens = stored[request.blocks].flatten(0, 1)[: request.new.end_position]
    for span in request.spans:
        tokens[span.position : span.end_position] = rows[span.row : span.end_row]
    if request.unstored_new:
        new = request.new
        tokens[new.position : new.end_position] = rows[new.row : new.end_row]
    return tokens.to(dtype).transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: RowRange,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Causal attention of consecutive rows over k, v [kv_heads, tokens, head_dim]."""
    k, v = k[:, : rows.end_position], v[:, : rows.end_position]
    kv_heads, head_dim = k.shape[0], k.shape[2]
    queries = q[rows.row : rows.end_row]
    if rows.size == 1:
        # One query per KV head and query head: the heads of a group share their K and V, so
        # they become the rows of one small product and nothing is repeated.
        grouped = queries.view(1, kv_heads, -1, head_dim)
        result = scaled_dot_product_attention(grouped, k[None], v[None], scale=scale)
        out[rows.row] = result.view(-1, head_dim)
        return
    result = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=_causal_mask(rows, q.device),
        is_causal=rows.position == 0,
        scale=scale,
        enable_gqa=queries.shape[1] != kv_heads,
    )
    out[rows.row : rows.end_row] = result[0].transpose(0, 1)


def _causal_mask(rows: RowRange, device: torch.device) -> torch.Tensor | None:
    """Row i sees positions up to its own. None when the rows begin at 0: plain causal."""
    if rows.position == 0:
        return None
    positions = torch.arange(rows.end_position, device=device)
    return positions[None, :] <= positions[rows.position :, None]
