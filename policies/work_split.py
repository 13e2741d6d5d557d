"""(l1, l2) and δ: how a step divides layers between link and processor, and the processor
between recomputation and decoding. Shared by all built-in policies.

Python floats only: this is asked every step, and must take microseconds.
"""

from __future__ import annotations

from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import ALL_THREADS, SystemState, WorkSplit

SWAP_ALL, RECOMPUTE_ALL = (1, 0), (0, 1)

CONFIGURATIONS = (SWAP_ALL, (3, 1), (2, 1), (3, 2), (1, 1), (2, 2), (1, 2), RECOMPUTE_ALL)
"""(l1, l2): the six that the paper considers, and the two ends. By growing share recomputed."""

WARP = 32


def plan_split(state: SystemState, plan: StepWork) -> WorkSplit:
    """The configuration with the shortest step, and the processor's share for recomputation by
    its share of the work.

    Transfers run beside all of the step's computation, so that a step takes the longer of
    T_dec + φ T_rec and (1 - φ) T_swap. Where the paper makes |T_swap - T_rec| least, this also
    counts the decode work, which transfers hide behind just as well.

    The eLLM paper's Eqs. (6) to (9), with the sizes that the model has (GQA, experts, gated MLP)
    for 24 h², causal pairs for s² r², the factor L that (7) lacks, and no output head: only
    decoded rows go through it, and it is no part of a layer.

    Args:
        state: gives model and hardware.
        plan: the step's work; its fields are numbers here. `swap_tokens` of the restored tokens
            can be fetched; the others are recomputed whatever the configuration.
    """
    model, hardware = state.model, state.hardware
    weights = model.attention_weights + model.experts_per_token * model.expert_weights
    pair_flops = 4.0 * model.heads * model.head_dim
    restored_tokens = float(plan.restored_tokens)
    restored_pairs = float(plan.restored_pairs)
    fetched = float(plan.swap_tokens)

    if fetched > 0.0:
        transfer = fetched * model.kv_bytes_per_token / hardware.link_bytes_per_s
        swap_s = (transfer + hardware.link_latency_s) / model.layers  # Eq. (6), one layer
        recompute_s = (  # Eq. (7), one layer
            2.0 * weights * restored_tokens / hardware.flops
            + pair_flops * restored_pairs / hardware.attention_flops
        )
        choice = min(fetched / max(restored_tokens, 1.0), 1.0) * recompute_s
        compute_s = _decode_layer_s(state, plan, weights) + recompute_s - choice
        l1, l2 = _shortest(swap_s, choice, compute_s)
    else:
        # Whatever memory pressure evicts beyond the plan comes from the host, where there is one.
        l1, l2 = SWAP_ALL if state.memory.host_tokens else RECOMPUTE_ALL

    recompute = l2 * (2.0 * weights * restored_tokens + pair_flops * restored_pairs)  # Eq. (8)
    rows, tokens = float(plan.decode_rows), float(plan.decode_tokens)
    decode = (l1 + l2) * (2.0 * weights * rows + pair_flops * (tokens + rows))  # Eq. (9)
    share = recompute / (recompute + decode) if recompute > 0.0 else 0.0
    warps = round(share * (ALL_THREADS // WARP))
    return WorkSplit(l1, l2, WARP * min(max(warps, 1), ALL_THREADS // WARP - 1))


def _decode_layer_s(state: SystemState, plan: StepWork, weights: int) -> float:
    """T_dec of one layer: the weights read and used once for all rows, the KV read."""
    model, hardware = state.model, state.hardware
    read = (model.attention_weights + model.experts * model.expert_weights) * model.weight_bytes
    compute = 2.0 * weights * float(plan.decode_rows) / hardware.flops
    tokens_s = float(plan.decode_tokens) * model.kv_bytes_per_token / model.layers
    kv_bytes_per_s = hardware.kv_bytes_per_s or hardware.device_bytes_per_s
    return max(read / hardware.device_bytes_per_s, compute) + tokens_s / kv_bytes_per_s


def _shortest(swap_s: float, recompute_s: float, decode_s: float) -> tuple[int, int]:
    """(l1, l2) of the shortest step; of equals, the one that recomputes least."""
    best, least = SWAP_ALL, float("inf")
    for l1, l2 in CONFIGURATIONS:
        share = l2 / (l1 + l2)
        step = max(decode_s + share * recompute_s, (1.0 - share) * swap_s)
        if step < least:
            best, least = (l1, l2), step
    return best
