"""The eLLM paper's cost model, Eqs. (2)-(4), (8) and (9), as printed (EuroSys'26).

FLOPs only: no bandwidth, no overheads. Where the printed equations are loose, they stay so here,
and `RooflineLatencyModel` does it right:

- (2), (3), (8), (9) charge the output head, 2 h V, for every token of a request. Only the row that
  decodes needs logits.
- 24 h² per layer and token is a dense MLP of width 4 h beside four h x h projections. Gated MLPs,
  grouped K and V heads and experts have other sizes.
- 4 h per (row, token) pair takes h for heads x head_dim; 4 h s² r² charges all pairs of a
  span, though half of them are masked, and no pair with the tokens before the span.
- (7), the time of (8), is left out: it should agree with (2) at l2 = L as (8) does, but l2 / L
  stands where l2 should.
- Weights and KV that have to be read from memory cost nothing, so T / b does not depend on b, and
  is least at r = 0 whatever the machine.
"""

from __future__ import annotations

import numpy as np

from ellm_sgl.latency.base import FloatArray, LatencyModel, Quantity, StepWork
from ellm_sgl.latency.profile import HardwareProfile, ModelShape


def recompute_layers_flops(
    shape: ModelShape, restored_tokens: Quantity, restored_squares: Quantity, recompute_layers: int
) -> Quantity:
    """V_K1 of Eq. (8), in FLOPs: recomputation of l2 layers; with l2 = L, V_rec of Eq. (2).

    Args:
        restored_tokens, restored_squares: Σ s_i r_i and Σ s_i² r_i².
        recompute_layers: l2.
    """
    h, l2 = shape.hidden, recompute_layers
    head = 2 * h * shape.vocabulary
    return 24 * h**2 * l2 * restored_tokens + 4 * h * l2 * restored_squares + head * restored_tokens


def decode_layers_flops(
    shape: ModelShape, rows: Quantity, tokens: Quantity, layers: int
) -> Quantity:
    """V_K2 of Eq. (9), in FLOPs: decoding through l1 + l2 layers; all L of them, V_dec of Eq. (3).

    Args:
        rows, tokens, layers: b, Σ s_i and l1 + l2.
    """
    h = shape.hidden
    head = 2 * h * shape.vocabulary
    return 24 * h**2 * layers * rows + 4 * h * layers * (tokens + rows) + head * tokens


class PaperLatencyModel(LatencyModel):
    """T = (V_rec + V_dec) / FLOPS, Eq. (4).

    The equation knows neither swapping nor prompts. Swapped tokens and the share of layers
    recomputed change nothing here; a prompt is charged as Eq. (2) charges a request with r = 1.

    Args:
        shape: the model.
        profile: gives FLOPS; the rest of it is not used.
    """

    def __init__(self, shape: ModelShape, profile: HardwareProfile) -> None:
        self._shape = shape
        self._profile = profile

    def step_seconds(self, work: StepWork) -> FloatArray:
        shape = self._shape
        # All pairs of n prompt rows, as (2) counts them: n², of which n (n + 1) / 2 are causal.
        restored_tokens = work.restored_tokens + work.prefill_rows
        restored_squares = work.restored_squares + 2 * work.prefill_pairs
        flops = recompute_layers_flops(shape, restored_tokens, restored_squares, shape.layers)
        flops = flops + decode_layers_flops(
            shape, work.decode_rows, work.decode_tokens, shape.layers
        )
        return np.asarray(flops / self._profile.flops, np.float64)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Nothing: the paper's model is a formula. Its error is reported beside the default's."""
