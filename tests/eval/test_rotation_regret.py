"""More requests than can be served: that they rotate costs no tokens and no SLO."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.simulator import Load, Settings, preset, simulate

pytestmark = pytest.mark.slow

SEEDS = (1, 2, 3)
"""One differs from another by 0.97 to 1.03."""


@pytest.mark.parametrize(
    ("scale", "device_tokens", "longest"),
    [
        # Of short requests the last block is a sixth, and paused ones keep it.
        (0.15, 1500, 300),
        # A device that holds few; SGLang's accounting keeps some out for whom there is room.
        (0.5, 2000, 1500),
    ],
)
def test_a_long_queue_is_served_as_fast_as_without(
    scale: float, device_tokens: int, longest: int
) -> None:
    machine = preset("llama2-13b").limited(device_tokens, None)
    rotating = Settings("ellm", "fcfs", {}, "swap", tpot_slo_s=0.2, layer_group=5, stride=1)
    plain = dataclasses.replace(rotating, policy_options={"rotate": False})
    tokens_per_s, ttft_s = np.zeros(2), np.zeros(2)
    for seed in SEEDS:
        trace = paper_workload("sharegpt", 120, seed, per_second=8.0).scaled(lengths=scale)
        load = Load.of(trace, longest, tpot_slo_s=0.2)
        both = [simulate(machine, settings, load).summary for settings in (rotating, plain)]
        assert all(found.slo_attainment == 1.0 for found in both)
        tokens_per_s += [found.tokens_per_s for found in both]
        ttft_s += [found.ttft.mean for found in both]
    assert tokens_per_s[0] >= 0.97 * tokens_per_s[1]
    assert ttft_s[0] <= ttft_s[1]
