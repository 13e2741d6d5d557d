"""500 streams at once for two minutes and more, a third of them cut off, while the pool shrinks and
grows and the ratio changes: each ends with the right tokens or is told when to come again, nothing
is lost, nothing leaks (`ellm_sgl.eval.soak` for longer)."""

from __future__ import annotations

import pytest

from ellm_sgl.eval.soak import Load, inspect, minutes_in_parts, soak

pytestmark = pytest.mark.slow

ASKED = Load(at_once=500, max_queued=300)
MINUTES = 1.4
"""And then, in each of four parts, until the last stream has ended."""


def test_five_hundred_streams_for_two_minutes() -> None:
    with ASKED.server() as server:
        report = inspect(server, ASKED, soak(server, ASKED, minutes_in_parts(MINUTES)))
    assert report.total.requests >= ASKED.at_once * len(report.parts)
    assert report.total.cut_off > report.total.requests // 10
    assert not report.problems, report
