"""One launch per layer: KV writing, recompute attention (K1) and decode attention (K2).

```
 program 0 .. k1)   write its share of the KV │ K1 tiles, longest first ─→ K2 tiles that are left
 program k1 .. n)   write its share of the KV │ K2 tiles ─────────────→ K1 tiles that are left
                                               └ each side's queue is one atomic counter
```

The programs are persistent: as many as fit the device at once, whatever the work. A tile is a few
query rows of one request and KV head (all query heads of its group, so that K and V are read
once) against a chunk of that request's tokens. Chunks of one tile are merged by log-sum-exp by
whichever program finishes last, in the order of the chunks: who computed what does not show in
the result, so neither δ nor the number of programs does.

KV that this step computes is read from the step's own rows, everything else from the pool. So
attention does not wait for the writes, and the two need no barrier between them.

All that changes from step to step is in device memory or a plain argument: a CUDA graph that has
captured the launch can replay it, and no value of δ compiles anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

PRECISION: tl.constexpr = tl.constexpr("tf32x3")
"""How fp32 is multiplied: in three tensor-core products, whose sum is as good as fp32's own. With
"ieee" the compiler needs kilobytes of local memory per thread. 16-bit types do not look at it."""

QUEUES = 3
"""int32 counters: next K1 tile, next K2 tile, programs that have finished."""


@triton.jit
def write_kv(
    k, v, keys, values, write_rows, write_units, write_offsets,
    writes, k_stride, v_stride, unit_stride, token_stride,
    ROW_ELEMENTS: tl.constexpr, BLOCK_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Copy every n-th row's K and V, all heads of it, to its place in the pool."""
    element = tl.arange(0, BLOCK_ELEMENTS)
    inside = element < ROW_ELEMENTS
    for i in range(tl.program_id(0), writes, tl.num_programs(0)):
        row = tl.load(write_rows + i).to(tl.int64)
        unit = tl.load(write_units + i).to(tl.int64)
        place = unit * unit_stride + tl.load(write_offsets + i) * token_stride
        new_k = tl.load(k + row * k_stride + element, mask=inside)
        tl.store(keys + place + element, new_k, mask=inside)
        new_v = tl.load(v + row * v_stride + element, mask=inside)
        tl.store(values + place + element, new_v, mask=inside)


@triton.jit
def attend(
    q, k, v, keys, values, out, blocks, tiles,
    arrived, partial_sums, partial_stats, index, out_rows, scale,
    q_stride, k_stride, v_stride, unit_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of one tile and KV head. `scale` includes log2(e): exponents are powers of two."""
    tile = tiles + (1 + index // KV_HEADS) * 12
    head = index % KV_HEADS
    first_row = tl.load(tile)
    if first_row < out_rows:
        tokens = tl.load(tile + 1)
        position = tl.load(tile + 2)
        start = tl.load(tile + 3)
        end = tl.load(tile + 4)
        table = blocks + tl.load(tile + 5)
        new_position = tl.load(tile + 6)
        new_row = tl.load(tile + 7)

        m = tl.arange(0, BLOCK_M)
        n = tl.arange(0, BLOCK_N)
        d = tl.arange(0, BLOCK_D)
        in_head = d < HEAD_DIM
        token = m // GROUP
        row = (first_row + token).to(tl.int64)
        column = (head * GROUP + m % GROUP) * HEAD_DIM
        rows_inside = token < tokens
        elements_inside = rows_inside[:, None] & in_head[None, :]
        q_at = q + (row * q_stride + column)[:, None] + d[None, :]
        queries = tl.load(q_at, mask=elements_inside, other=0.0)

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        in_row = head * HEAD_DIM + d
        for first in range(start, end, BLOCK_N):
            at = first + n
            inside = at < end
            new = at >= new_position
            # Of a block that this step computes: -1 - its first row. Otherwise its unit.
            block = tl.load(table + at // BLOCK_TOKENS, mask=inside & (at < new_position), other=0)
            in_step = new | (block < 0)
            offset = at % BLOCK_TOKENS
            step_row = tl.where(new, new_row + at - new_position, offset - 1 - block).to(tl.int64)
            place = block.to(tl.int64) * unit_stride + offset * token_stride
            element = inside[:, None] & in_head[None, :]
            k_at = tl.where(in_step, k + step_row * k_stride, keys + place)
            v_at = tl.where(in_step, v + step_row * v_stride, values + place)
            chunk_k = tl.load(k_at[:, None] + in_row[None, :], mask=element, other=0.0)
            scores = tl.dot(queries, tl.trans(chunk_k), input_precision=PRECISION) * scale
            seen = inside[None, :] & (at[None, :] <= (position + token)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            # A row that has seen nothing yet: any finite number keeps NaN away.
            level = tl.where(above == float("-inf"), 0.0, above)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(highest - level)
            total = total * fade + tl.sum(weights, 1)
            chunk_v = tl.load(v_at[:, None] + in_row[None, :], mask=element, other=0.0)
            weighted = tl.dot(weights.to(chunk_v.dtype), chunk_v, input_precision=PRECISION)
            sums = sums * fade[:, None] + weighted
            highest = above

        chunks = tl.load(tile + 9)
        out_at = out + (row * (KV_HEADS * GROUP * HEAD_DIM) + column)[:, None] + d[None, :]
        if chunks == 1:
            result = sums / total[:, None]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=elements_inside)
        else:
            # [chunk, head, row of the tile], of all tiles with several chunks.
            partial = tl.load(tile + 10).to(tl.int64) * KV_HEADS + head * BLOCK_M
            chunk_rows = KV_HEADS * BLOCK_M
            own = partial + tl.load(tile + 8) * chunk_rows + m
            tl.store(
                partial_sums + own[:, None] * BLOCK_D + d[None, :], sums, mask=rows_inside[:, None]
            )
            tl.store(partial_stats + own * 2, highest, mask=rows_inside)
            tl.store(partial_stats + own * 2 + 1, total, mask=rows_inside)
            # All of this program's stores come before its arrival, which releases them.
            tl.debug_barrier()
            counter = arrived + tl.load(tile + 11) * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
                tl.debug_barrier()
                highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for chunk in range(chunks):
                    other = partial + chunk * chunk_rows + m
                    # .cg: other processors' stores are in the second-level cache, not in ours.
                    their_highest = tl.load(
                        partial_stats + other * 2,
                        mask=rows_inside, other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    their_total = tl.load(
                        partial_stats + other * 2 + 1,
                        mask=rows_inside, other=1.0, cache_modifier=".cg",
                    )  # fmt: skip
                    their_sums = tl.load(
                        partial_sums + other[:, None] * BLOCK_D + d[None, :],
                        mask=rows_inside[:, None], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    above = tl.maximum(highest, their_highest)
                    level = tl.where(above == float("-inf"), 0.0, above)
                    fade = tl.exp2(highest - level)
                    share = tl.exp2(their_highest - level)
                    total = total * fade + their_total * share
                    sums = sums * fade[:, None] + their_sums * share[:, None]
                    highest = above
                tl.atomic_xchg(counter, 0)  # for the next launch
                result = sums / total[:, None]
                tl.store(out_at, result.to(out.dtype.element_ty), mask=elements_inside)


NUMBERS = ["writes", "out_rows", "k1_programs"]
LISTS = ["write_rows", "write_units", "write_offsets", "blocks", "tiles"]
"""Those of a layer group begin where the last one's end. Compiling for an alignment that no step
had before would stop a server for seconds."""


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS + LISTS)
def fused_attention(
    q, k, v, keys, values, out, write_rows, write_units,
    write_offsets, blocks, tiles, queues, arrived,
    partial_sums, partial_stats, writes, out_rows, k1_programs,
    scale, q_stride, k_stride, v_stride, unit_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROW_ELEMENTS: tl.constexpr, BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_K1: tl.constexpr, BLOCK_K2: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """See the module's docstring; `attention.Prepared` says what the tensors hold.

    `queues` and `arrived` are 0 before the launch, and again after it.
    """
    write_kv(
        k, v, keys, values, write_rows, write_units, write_offsets, writes,
        k_stride, v_stride, unit_stride, token_stride, ROW_ELEMENTS, BLOCK_ELEMENTS,
    )  # fmt: skip
    recomputing = tl.load(tiles) * KV_HEADS
    decoding = tl.load(tiles + 1) * KV_HEADS
    side = tl.where(tl.program_id(0) < k1_programs, 0, 1)
    sides_done = 0
    while sides_done < 2:
        index = tl.atomic_add(queues + side, 1, sem="relaxed")
        if index >= tl.where(side == 0, recomputing, decoding):
            side = 1 - side
            sides_done += 1
        elif side == 0:
            attend(
                q, k, v, keys, values, out, blocks, tiles, arrived, partial_sums, partial_stats,
                index, out_rows, scale, q_stride, k_stride, v_stride, unit_stride, token_stride,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_TOKENS, BLOCK_K1, BLOCK_N,
            )  # fmt: skip
        else:
            attend(
                q, k, v, keys, values, out, blocks, tiles, arrived, partial_sums, partial_stats,
                recomputing + index, out_rows, scale, q_stride, k_stride, v_stride,
                unit_stride, token_stride,
                KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_TOKENS, BLOCK_K2, BLOCK_N,
            )  # fmt: skip
    if tl.atomic_add(queues + 2, 1) == tl.num_programs(0) - 1:
        # Everybody is past the queues: make them ready for the next launch.
        tl.atomic_xchg(queues, 0)
        tl.atomic_xchg(queues + 1, 0)
        tl.atomic_xchg(queues + 2, 0)
