"""What a step takes where a host tier delivers what is missing."""

from __future__ import annotations

from dataclasses import replace

from ellm_sgl.latency.base import FloatArray, LatencyModel, StepWork


class FetchingLatencyModel(LatencyModel):
    """Takes everything that a step restores to be fetched from host memory, not recomputed.

    What policies are given on a server with a host tier: they ask about tokens restored, and the
    cheap way is how the server restores them while the host has them.

    Args:
        inner: predicts a step of known ways; this one learns nothing.
    """

    def __init__(self, inner: LatencyModel) -> None:
        self._inner = inner

    def step_seconds(self, work: StepWork) -> FloatArray:
        fetched = replace(work, swap_tokens=work.restored_tokens, recompute_share=0.0)
        return self._inner.step_seconds(fetched)

    def observe(self, work: StepWork, seconds: float) -> None:
        raise TypeError("show measured steps to the model within")
