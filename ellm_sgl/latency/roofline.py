"""The default latency model: what a step reads and computes, over what the machine sustains.

A step costs

    overheads + max(R, C) + (1 - overlap) min(R, C) + KV read + attention + fetching,

R the time to read the weights that its rows go through, C to compute with them; or, if that takes
longer, the transfer from host memory that runs beside it. Linear in a few components, so that
factors for them can be learnt online.
"""

from __future__ import annotations

import math

import numpy as np

from ellm_sgl.latency.base import FloatArray, LatencyModel, Quantity, StepWork, larger, smaller
from ellm_sgl.latency.online import Correction
from ellm_sgl.latency.profile import HardwareProfile, ModelShape

COMPONENTS = (
    "step",
    "row",
    "read",
    "packing",
    "compute",
    "serial",
    "kv",
    "attention",
    "fetch",
    "restore",
    "turn",
)
"""Parts of a step's time that have a factor each."""


class RooflineLatencyModel(LatencyModel):
    """A roofline, whose components are scaled online so that they fit the measured steps.

    Args:
        shape: the model, as one rank holds it.
        profile: the machine, as one rank has it: calibrated at start-up, or a preset.
    """

    def __init__(self, shape: ModelShape, profile: HardwareProfile) -> None:
        self._profile = profile
        read = shape.weight_bytes / profile.device_bytes_per_s
        compute = 2 / profile.flops
        expert = shape.layers * shape.expert_weights
        head = shape.hidden * shape.vocabulary
        always = shape.layers * shape.attention_weights
        self._experts = shape.experts
        self._read_s = read * (always + expert * shape.experts + head)
        self._experts_read_s = read * expert * shape.experts
        self._row_s = compute * (always + expert * shape.experts_per_token)
        self._head_row_s = compute * head
        # log of the share of rows that do not go through a given expert; finite also if all do
        self._log_missed = math.log1p(-min(shape.experts_per_token / shape.experts, 1 - 1e-12))
        self._serial = 1.0 - profile.overlap
        self._token_s = shape.kv_bytes_per_token / (
            profile.kv_bytes_per_s or profile.device_bytes_per_s
        )
        self._pair_s = 4 * shape.layers * shape.heads * shape.head_dim / profile.attention_flops
        self._swap_token_s = shape.kv_bytes_per_token / profile.link_bytes_per_s
        self._fetch_token_s = profile.fetch_share * self._swap_token_s
        self._correction = Correction(len(COMPONENTS))
        self._latest: tuple[StepWork, tuple[Quantity, ...]] | None = None
        """The latest step asked about, and its components: it is the next one to be observed."""

    @property
    def factors(self) -> dict[str, float]:
        """What each component of the profile is multiplied by, as learnt so far; 1 at first."""
        return dict(zip(COMPONENTS, self._correction.factors.tolist(), strict=True))

    def step_seconds(self, work: StepWork) -> FloatArray:
        total: Quantity = 0.0
        parts = self._components(work)
        self._latest = work, parts
        for factor, part in zip(self._correction.factors.tolist(), parts, strict=True):
            total = total + factor * part
        if isinstance(work.swap_tokens, np.ndarray) or work.swap_tokens:
            total = larger(total, self._swap_seconds(work))
        return np.asarray(total, np.float64)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one measured step. Ignored, since they say nothing about the components:
        times that are no positive number, and steps bounded by their transfer."""
        latest = self._latest
        known = latest[1] if latest is not None and latest[0] is work else None
        parts = np.array(known or self._components(work), np.float64)
        fetches = bool(work.swap_tokens)
        if not fetches or self._swap_seconds(work) < self._correction.factors @ parts:
            self._correction.observe(parts, seconds)

    def _components(self, work: StepWork) -> tuple[Quantity, ...]:
        """Seconds of each of `COMPONENTS`; none falls as any field but the share grows.

        `read` is reading the weights, `packing` what more than one row adds to that, `compute`
        what computing takes beyond reading, `serial` what of the rest does not overlap, and
        `fetch` what a transfer takes from the step that it runs beside; `restore` is restoring
        anything at all.
        """
        profile, share, restored = self._profile, work.recompute_share, work.restored_tokens
        rows = work.decode_rows + work.prefill_rows + share * restored
        # Logits: one row per request that decodes, and one for a prompt.
        head_rows = work.decode_rows + smaller(work.prefill_rows, 1)
        read = self._weights_read_s(rows)
        compute = self._row_s * rows + self._head_row_s * head_rows
        hidden = smaller(compute, read)
        more_rows = smaller(rows - smaller(rows, 1), 1)
        return (
            profile.step_overhead_s,
            profile.row_overhead_s * work.decode_rows + profile.reduce_row_s * rows,
            read,
            profile.packing * read * more_rows,
            compute - hidden,
            self._serial * hidden,
            self._token_s * work.decode_tokens,
            self._pair_s * (share * work.restored_pairs + work.prefill_pairs),
            self._fetch_token_s * work.swap_tokens * (1.0 - share),
            profile.restore_overhead_s * smaller(restored, 1)
            + profile.recompute_overhead_s * smaller(share * restored, 1),
            profile.phase_change_s * work.phase_changes,
        )

    def _swap_seconds(self, work: StepWork) -> Quantity:
        """Time of the transfer from host memory; Eq. (6) with l1 / L = 1 - φ."""
        tokens = work.swap_tokens
        wire = self._swap_token_s * tokens * (1.0 - work.recompute_share)
        return wire + self._profile.link_latency_s * smaller(tokens, 1)

    def _weights_read_s(self, rows: Quantity) -> Quantity:
        """Time to read the weights once; of experts, those that some row goes through.

        Each row takes `experts_per_token` of the experts. If its choice is even, an expert is
        missed by n rows with probability (1 - k / E)ⁿ.
        """
        if self._experts == 1:
            return self._read_s
        return self._read_s - self._experts_read_s * np.exp(self._log_missed * rows)
