"""500 streams at once for two minutes, a third of them cut off, while the pool shrinks and grows
and the ratio changes: each ends with the right tokens or is told when to come again, nothing is
lost, nothing leaks (`ellm_sgl.eval.soak` for longer)."""

from __future__ import annotations

import pytest

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.eval.soak import (
    MOST_GROWTH,
    Load,
    SoakReport,
    inspect,
    minutes_in_parts,
    soak,
)

pytestmark = pytest.mark.slow

ASKED = Load(at_once=500, max_queued=300)
MINUTES = 1.4
"""And then, in each of four parts, until the last stream has ended."""


def test_five_hundred_streams_for_two_minutes() -> None:
    with ASKED.server() as server:
        report = look(server)
        if report.growth >= MOST_GROWTH:
            # The heap grows once with the largest step, which may come late; a leak goes on.
            resident_mb = [part.resident_mb for part in report.parts]
            report = look(server)
            resident_mb += [part.resident_mb for part in report.parts]
            assert report.growth < MOST_GROWTH, resident_mb


def look(server: ServerProcess) -> SoakReport:
    """Of one more soak; memory may have grown, all else is well."""
    report = inspect(server, ASKED, soak(server, ASKED, minutes_in_parts(MINUTES)))
    assert report.total.requests >= ASKED.at_once * len(report.parts)
    assert report.total.cut_off > report.total.requests // 10
    others = [problem for problem in report.problems if not problem.startswith("memory has grown")]
    assert not others, report
    return report
