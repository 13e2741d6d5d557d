"""What SGLang does by itself: admit what its accounting allows, keep all of it cached."""

from __future__ import annotations

from ellm_sgl.policies.fixed_ratio import FixedRatio


class Stock(FixedRatio):
    """All that wait are admitted in order; nothing is evicted before memory runs out."""

    def __init__(self) -> None:
        super().__init__(ratio=0.0)
