"""2,000 requests of all kinds, a third of them cut off in mid-stream, while the pool shrinks and
grows and the ratio changes: nothing is lost, nothing leaks (`ellm_sgl.eval.soak` for longer)."""

from __future__ import annotations

import pytest

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.eval.soak import inspect, soak

pytestmark = pytest.mark.slow

REQUESTS = 2000
PARTS = 4


def test_two_thousand_requests_with_aborts(server: ServerProcess) -> None:
    parts = soak(server, iter([lambda sent: sent >= REQUESTS // PARTS] * PARTS))
    report = inspect(server, parts)
    assert sum(part.requests for part in parts) == REQUESTS
    assert sum(part.cut_off for part in parts) > REQUESTS // 10
    assert not report.problems, report
