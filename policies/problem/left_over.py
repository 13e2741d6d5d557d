"""Those who are left over: requests that are known but not in a batch have to run as well.

Where many of them wait, they run later as the batch does now, and the best batch is the one that
makes most tokens per second. The last few would run by themselves: a step of few rows takes almost
as long as one of many, and that time is all spent on them.

With an SLO on the time per token the rate alone counts: slower steps for the last few would be at
the expense of everybody's SLO.
"""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.policies.base import FloatArray, IntArray


def rate_of_all(
    rate: FloatArray,
    sizes: IntArray,
    slo_s: FloatArray | float,
    known: int,
    tokens: float,
    latency: LatencyModel,
) -> FloatArray:
    """Tokens per second until all who are known have ended, if nobody comes: first a batch, then
    those who are left over, all of whose KV is cached then; no faster than the batch. With an SLO
    those of the batch alone.

    Args:
        rate: of batches, tokens per second, [sizes]; 0 where there can be none.
        sizes: requests in them, int64 [sizes].
        slo_s: the least SLO on the time per token, [sizes] or of all; inf where there is none.
        known: requests that run or wait.
        tokens: length of a request, on average.
        latency: predicts a step's time.
    """
    left = np.maximum(known - sizes, 0)
    alone_s = latency.step_seconds(StepWork(left, tokens * left))
    as_many = np.where(left > 0, np.maximum(left, alone_s * rate), 0.0)  # in the same time
    of_all = rate * np.maximum(known, sizes) / (sizes + as_many)
    return np.where(np.isinf(slo_s), of_all, rate)
