"""The definition of attention over a partly cached request, in plain PyTorch.

Slow and obvious: one row at a time, float64 inside. Every kernel is tested against it.
"""

from __future__ import annotations

import torch

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
) -> torch.Tensor:
    """Write the new KV to the pool, then attend every row to its request's tokens.

    Args:
        q: [rows, heads, head_dim]; k, v: [rows, kv_heads, head_dim] (RoPE applied).
        keys, values: [units, block_tokens, kv_heads, head_dim], changed in place.
        layout: which row is which token, and where the other tokens' KV is.
        scale: factor of q·k.
        out_rows: attend only the first so many rows; it splits no range of the layout. The
            others give their KV and are not asked for more. None: all.

    Returns:
        [out_rows, heads, head_dim], dtype of q.
    """
    write = layout.write_units, layout.write_offsets
    keys[write] = k[layout.write_rows].to(keys.dtype)
    values[write] = v[layout.write_rows].to(values.dtype)
    out = torch.empty_like(q[:out_rows])
    for request in layout.requests:
        all_k = _tokens(request, layout, keys, k)
        all_v = _tokens(request, layout, values, v)
        for rows in (request.new, *request.spans):
            if rows.row >= len(out):
                continue
            for i in range(rows.size):
                seen = rows.position + i + 1
                out[rows.row + i] = _attend(q[rows.row + i], all_k[:seen], all_v[:seen], scale)
    return out


def _tokens(
    request: RequestLayout, layout: GroupLayout, stored: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """K or V of all tokens of a request in order, [tokens, kv_heads, head_dim]."""
    units = layout.units[request.blocks]
    tokens = stored[units].flatten(0, 1)[: request.new.end_position].clone()
    from_step: tuple[RowRange, ...] = request.spans
    if request.unstored_new:
        from_step += (request.new,)
    for span in from_step:
        tokens[span.position : span.end_position] = rows[span.row : span.end_row].to(stored.dtype)
    return tokens


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [heads, d] over k, v [n, kv_heads, d]: softmax(scale · q·k) v, per head."""
    group = q.shape[0] // k.shape[1]
    k64 = k.double().repeat_interleave(group, dim=1)
    v64 = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q.double(), k64) * scale
    return torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), v64).to(q.dtype)
