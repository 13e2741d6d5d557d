"""`--ellm-mode`: eLLM, or a baseline that moves whole requests, on the same pool and kernels.

What a baseline keeps of its original, and what not, is told in docs/policies.md.
"""

from __future__ import annotations

from ellm_sgl.config import HCACHE, RECOMPUTE, SWAP, EllmConfig
from ellm_sgl.policies import Policy, Stock
from ellm_sgl.policies.baselines.whole_requests import WholeRequests
from ellm_sgl.policies.registry import create

BASELINES: dict[str, type[Policy]] = {
    RECOMPUTE: Stock,
    SWAP: WholeRequests,
    HCACHE: WholeRequests,
}


def policy_of(config: EllmConfig) -> Policy:
    """What decides on a server with these settings.

    Raises:
        ConfigError: as `registry.create`.
    """
    if config.is_baseline:
        return BASELINES[config.mode]()
    return create(config.policy, config.options)
