"""Every step of a load is seen, or the measurement fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ellm_sgl.eval.bench import all_steps as module
from ellm_sgl.eval.bench.all_steps import all_steps
from ellm_sgl.eval.bench.result import MeasurementError

KEPT = 5


class Server:
    """Keeps the last steps. Of those that are taken between two looks there are `each`."""

    def __init__(self, each: int) -> None:
        self.total, self.each, self.looks = 0, each, 0
        self.looked = threading.Semaphore(0)

    def steps(self) -> list[dict[str, Any]]:
        self.total += self.each
        self.looked.release()
        return [{"ended_s": float(i)} for i in range(max(self.total - KEPT, 0), self.total)]

    def state(self, integrity: bool) -> dict[str, Any]:
        return {"steps_total": self.total}


@pytest.mark.parametrize("each", [0, 3, KEPT])
def test_more_steps_than_are_kept(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    server: Any = Server(each)
    with all_steps(server) as taken:
        for _ in range(4):
            assert server.looked.acquire(timeout=30)
        server.each = 0
        found = taken()
    assert [step["ended_s"] for step in found] == list(range(server.total))
    assert server.total >= 3 * each


def test_steps_that_were_not_seen_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    server: Any = Server(KEPT + 1)
    with all_steps(server) as taken:
        assert server.looked.acquire(timeout=30)
        with pytest.raises(MeasurementError, match=r"of \d+ steps \d+ were seen"):
            taken()
