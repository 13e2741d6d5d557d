"""SGLang's check of a busy server's memory counts a prompt whose next chunk waits."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.sglang import scheduler
from ellm_sgl.sglang.hooks import hooks_of
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.versions import installed

declare()

COUNTED = any(hook.function is scheduler.count_waiting_chunk for hook in hooks_of(installed()))
"""By a hook of ours: later versions of SGLang do it themselves."""
PAGE = 16


def request(allocated: int, cached: int) -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(kv_allocated_len=allocated), cache_protected_len=cached
    )


def batch(*reqs: Any) -> Any:
    return SimpleNamespace(reqs=reqs, is_empty=lambda: not reqs)


def counted(monkeypatch: pytest.MonkeyPatch, chunked: Any, last: Any, running: Any) -> int:
    from sglang.srt.managers.scheduler_components.invariant_checker import (
        SchedulerInvariantChecker,
    )

    checker = object.__new__(SchedulerInvariantChecker)
    checker.page_size, checker.is_hybrid_swa = PAGE, False
    checker.get_last_batch = lambda: last
    checker.get_running_batch = lambda: running
    ours = SimpleNamespace(scheduler=SimpleNamespace(chunked_req=chunked, last_batch=last))
    monkeypatch.setattr(scheduler, "scheduler_of", lambda owner: ours)
    sizes = inspect.unwrap(SchedulerInvariantChecker._get_total_uncached_sizes)(checker)
    full, sliding = scheduler.count_waiting_chunk(sizes, checker) or sizes
    assert sliding == 0
    return full


@pytest.mark.skipif(not COUNTED, reason="SGLang counts it")
def test_each_request_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes, prompt = request(157, 144), request(481, 480)
    decoding, nobody = batch(decodes), batch()
    # It waits while the other decodes.
    assert counted(monkeypatch, prompt, decoding, decoding) == 16 + 16
    # Its chunk was in the last step, with the other's token or alone.
    assert counted(monkeypatch, prompt, batch(prompt, decodes), nobody) == 16 + 16
    assert counted(monkeypatch, prompt, batch(prompt), decoding) == 16 + 16
    # There is none, or it has been sent back to the queue.
    assert counted(monkeypatch, None, decoding, decoding) == 16
    assert counted(monkeypatch, SimpleNamespace(kv=None), decoding, decoding) == 16


@pytest.mark.skipif(COUNTED, reason="SGLang does not")
def test_later_versions_count_it() -> None:
    from sglang.srt.managers.scheduler_components import invariant_checker

    assert "get_chunked_req" in inspect.getsource(invariant_checker)
