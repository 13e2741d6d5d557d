"""Which layers the host keeps as hidden states, so that link and processor are busy alike."""

from __future__ import annotations

from ellm_sgl.latency.profile import HardwareProfile, ModelShape


def hidden_layers(model: ModelShape, hardware: HardwareProfile, on_device: bool = False) -> int:
    """HCache's partition (EuroSys 2025, its restoration scheduler): L_H layers kept as hidden
    states, L - L_H as KV, such that restoring a token takes least, link and processor side by side:

        max(L_H C_H, L_H IO_H + (L - L_H) IO_KV)

    C_H: time to project one layer's hidden state to K and V; IO_H, IO_KV: time to fetch a layer's
    hidden state, or its KV. All three grow with the number of tokens alike, so it does not matter.
    Where both sides can balance, that is at L_H = L IO_KV / (IO_KV + C_H - IO_H). All layers keep
    hidden states if projecting is faster than fetching them; none does if they are larger than
    KV (heads that share it), which is then less to fetch and nothing to compute.

    HCache pairs hidden states with recomputation where the link is the bottleneck. Here a step's
    plan does that: of what the host has, it recomputes the lowest φ L layers (`WorkSplit`).

    Args:
        on_device: hidden states are kept on the device, and need not be fetched: IO_H = 0.

    Returns:
        L_H, from 0 to L; of equally good ones the least.
    """
    kv_width = model.kv_heads * model.head_dim
    project_s = 2 * model.hidden * 2 * kv_width / hardware.flops
    link = hardware.link_bytes_per_s
    fetch_hidden_s = 0.0 if on_device else model.hidden * model.kv_bytes / link
    fetch_kv_s = 2 * kv_width * model.kv_bytes / link

    def restore_s(layers: int) -> float:
        fetch = layers * fetch_hidden_s + (model.layers - layers) * fetch_kv_s
        return max(layers * project_s, fetch)

    return min(range(model.layers + 1), key=restore_s)
