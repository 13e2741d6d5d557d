"""How far a long prompt is that is computed in chunks, how fast it goes on, and when it will be
done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.policies import StepReport

RECENT_S = 5.0
"""How fast it goes on is how fast its chunks did in so many seconds,"""
FEWEST_CHUNKS = 2
"""or as so many chunks did, if these took longer. What lies before a longer time of nothing but
decoding is another prompt's."""


def describe_progress(
    done: int,
    total: int,
    in_flight: int,
    most: int,
    steps: Iterable[StepReport],
    latency: LatencyModel,
) -> dict[str, Any]:
    """Of a prompt of which something is left. Chunks take longer the more tokens are before them:
    what is left is predicted by the latency model, and corrected by what steps of late took over
    what it had predicted of chunks, those that decoded between them included. The chunks to come
    are taken to be of as many tokens as the last one, since memory may keep them from being longer.

    Args:
        done, total: its tokens; `done` with those of the chunk that is computed just now,
        in_flight: so many, whose step is not among
        steps: the latest first.
        most: tokens that a chunk may have.

    Returns:
        `done` tokens, `tokens_per_s` of late (None before its first chunk has been computed) and
        `left_ms`.
    """
    spent_s = predicted_s = decoding_s = 0.0
    tokens, chunks, chunk = 0, 0, in_flight
    for step in steps:
        recent = spent_s <= RECENT_S or chunks < FEWEST_CHUNKS
        if not recent or decoding_s > RECENT_S or tokens >= done - in_flight:
            break
        decoding_s += step.seconds
        if step.work.prefill_rows:
            rows_then = int(step.work.prefill_rows)
            tokens, chunk = tokens + rows_then, chunk or rows_then
            spent_s, decoding_s = spent_s + decoding_s, 0.0
            predicted_s += step.predicted_s
            chunks += 1
    chunk = max(min(chunk or most, most), 1)
    begins = np.arange(done, total, chunk)
    rows = np.minimum(total - begins, chunk)
    pairs = rows * (begins + (rows + 1) / 2)
    work = StepWork(0, 0, prefill_rows=rows, prefill_pairs=pairs)
    left_s = float(np.broadcast_to(latency.step_seconds(work), rows.shape).sum())
    if predicted_s > 0.0:
        left_s *= spent_s / predicted_s
    return {
        "done": done,
        "tokens_per_s": tokens / spent_s if chunks else None,
        "left_ms": left_s * 1e3,
    }
