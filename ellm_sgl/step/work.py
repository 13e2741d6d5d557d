"""The work of a planned step, summed up for a latency model."""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.step.plan import StepPlan


def planned_work(plan: StepPlan, decoding: bool) -> StepWork:
    """The work of a step as planned: what its rows compute, what they read, what is fetched.

    Args:
        decoding: SGLang's own rows are one new token per request, not prompts.
    """
    requests = plan.groups[0].requests
    if decoding and not plan.restored:  # most steps
        return StepWork(len(requests), sum(r.new.end_position for r in requests))
    rows = np.array([r.new.size for r in requests])
    ends = np.array([r.new.end_position for r in requests])
    counts, starts = np.array(plan.restored, np.int64).reshape(-1, 2).T
    computed = sum(group.rows - plan.new_rows for group in plan.groups)
    fetched = plan.fetched_tokens
    return StepWork(
        decode_rows=len(rows) if decoding else 0,
        decode_tokens=int(ends.sum()) if decoding else 0,
        restored_tokens=int(counts.sum()),
        restored_squares=float((counts * counts).sum()),
        restored_prefix=float((counts * starts).sum()),
        prefill_rows=0 if decoding else int(rows.sum()),
        prefill_pairs=0.0 if decoding else float((rows * ends - rows * (rows - 1) / 2).sum()),
        swap_tokens=int(counts.sum()) if fetched else 0,
        recompute_share=computed / (computed + fetched) if computed + fetched else 1.0,
    )
