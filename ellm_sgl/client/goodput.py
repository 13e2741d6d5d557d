"""Goodput: the largest rate at which enough requests meet their SLOs (as in DistServe, OSDI'24)."""

from __future__ import annotations

from collections.abc import Callable

ATTAINMENT = 0.9
"""Share of the requests that have to meet their SLOs."""


def goodput(
    attainment: Callable[[float], float],
    low: float,
    high: float,
    *,
    wanted: float = ATTAINMENT,
    precision: float = 0.05,
) -> float:
    """The largest rate in [low, high] with enough attainment, by bisection on its logarithm.

    Args:
        attainment: share of the requests that meet their SLOs at a rate; taken to fall with it.
        low: requests per second.
        high: requests per second.
        wanted: attainment that is enough.
        precision: stop when the ends differ by this share.

    Returns:
        Requests per second; 0 if even `low` is too many.
    """
    if not 0 < low <= high:
        raise ValueError(f"give rates 0 < low <= high, not {low} and {high}")
    if attainment(low) < wanted:
        return 0.0
    if attainment(high) >= wanted:
        return high
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if attainment(middle) >= wanted:
            low = middle
        else:
            high = middle
    return low
