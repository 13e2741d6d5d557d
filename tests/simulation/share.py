"""A process's share of many lives.

A module of its own: a process that is spawned imports it by name, which `__main__` has not, and
only such a process imports SGLang.
"""

from __future__ import annotations

from collections import Counter

from ellm_sgl.sglang.platform.torchvision_ops import declare


def live_share(first: int, end: int, shrink_s: float) -> tuple[int, dict[str, int], list[str]]:
    """Lives of the seeds [first, end), in a process of its own: how many, what they came by, and
    reports of those that failed."""
    declare()
    from tests.simulation.campaign import run
    from tests.simulation.sglang_process import hooked

    totals: Counter[str] = Counter()
    with hooked():
        found = [f for f in run(range(first, end), totals) if f is not None]
        reports = [f.report(shrink_s) for f in found]
    return end - first, dict(totals), reports
