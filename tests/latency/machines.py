"""Models and machines to predict for, and random steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ellm_sgl.latency import HardwareProfile, ModelShape, StepWork

LLAMA = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
)
MOE = ModelShape(
    layers=24,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=768,
    vocabulary=150_000,
    experts=128,
    experts_per_token=8,
)
TINY = ModelShape(8, 192, 6, 2, 32, 512, 264, weight_bytes=4, kv_bytes=4)
GPU = HardwareProfile(
    name="gpu",
    flops=2e14,
    device_bytes_per_s=1.7e12,
    link_bytes_per_s=2.5e10,
    link_latency_s=1e-5,
    step_overhead_s=2e-3,
    row_overhead_s=1e-5,
    attention_flops=1e14,
)
CPU = HardwareProfile(
    name="cpu",
    flops=7e10,
    device_bytes_per_s=1.2e10,
    link_bytes_per_s=8e9,
    link_latency_s=4e-6,
    step_overhead_s=4e-3,
    row_overhead_s=3e-4,
    attention_flops=5e10,
    kv_bytes_per_s=2.7e9,
    packing=0.5,
    overlap=0.1,
)


def random_work(rng: np.random.Generator) -> StepWork:
    """A step of 1 to 16 unequal requests that decode, some with a span, or a prompt."""
    if rng.random() < 0.15:
        n = int(rng.integers(16, 1024))
        return StepWork(0, 0, prefill_rows=n, prefill_pairs=n * (n + 1) // 2)
    tokens = rng.integers(16, 1500, size=rng.integers(1, 17))
    spans = (tokens * rng.choice([0.0, 0.1, 0.3, 0.5])).astype(int)
    return work_of(tokens, spans)


def work_of(tokens: Any, spans: Any) -> StepWork:
    """Decoding requests of `tokens` tokens each, of which the first `spans` are restored."""
    return StepWork(
        decode_rows=len(tokens),
        decode_tokens=int(np.sum(tokens)),
        restored_tokens=int(np.sum(spans)),
        restored_squares=int(np.sum(np.square(spans))),
    )
