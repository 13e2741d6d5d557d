"""`SGLANG_REQ_RUNNING_TIMEOUT` sees requests that are paused, as it sees those that run."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.sglang import scheduler as ours
from ellm_sgl.sglang.hooks import hooks_of
from ellm_sgl.sglang.paused import PausedRequests
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.versions import installed

declare()


class Request:
    """That runs, and has for long."""

    rid = "paused"
    to_finish = None
    time_stats = SimpleNamespace(forward_entry_time=1e-9)

    def finished(self) -> bool:
        return False


def before(target: str) -> list[Any]:
    """Our hooks before one of the scheduler's functions, in the order in which they run."""
    named = f"sglang.srt.managers.scheduler.Scheduler.{target}"
    hooks = [h.function for h in hooks_of(installed()) if h.target == named and h.kind == "BEFORE"]
    return hooks[::-1]


def test_paused_requests_are_back_when_sglang_looks_who_has_run_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    if not hasattr(Scheduler, "_poll_timeout_aborts"):
        # 0.5.17: after those who were paused are back.
        pytest.skip("this SGLang looks as it makes a batch")
    ingest = inspect.getsource(inspect.unwrap(Scheduler.ingest_requests))
    assert ingest.index("self._poll_timeout_aborts()") < ingest.index("self.process_input_requests")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "1")
    empty = SimpleNamespace(reqs=[], is_empty=lambda: True, batch_is_full=False)
    scheduler: Any = SimpleNamespace(
        running_batch=empty, last_batch=None, waiting_queue=[], ps=SimpleNamespace(pp_size=1)
    )
    scheduler._collect_inflight_batches = lambda: [scheduler.running_batch, scheduler.last_batch]
    batch: Any = SimpleNamespace(reqs=[Request()], batch_is_full=False)
    side = SimpleNamespace(paused=PausedRequests(scheduler, batch))
    monkeypatch.setattr(ours, "scheduler_of", lambda owner: side)
    for hook in before("ingest_requests"):
        hook(scheduler)
    aborts = inspect.unwrap(Scheduler._poll_timeout_aborts)(scheduler)
    assert [abort.rid for abort in aborts] == ["paused"]


def test_paused_requests_are_back_before_requests_are_processed() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    first = "ingest_requests" if hasattr(Scheduler, "ingest_requests") else "process_input_requests"
    assert ours.resume_paused in before(first)
