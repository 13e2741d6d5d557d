"""Weight updates in the scheduler: refused while KV is in use, in the words of each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.engine import Iteration, StepLog
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.memory import KVPool, PageTable, PoolShape
from ellm_sgl.sglang import occupation, weights
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.scheduler import EllmScheduler, Released
from ellm_sgl.sglang.versions import adapter
from tests.latency.machines import GPU, TINY

declare()
BLOCKS = "cached prefixes are in use (blocks: 2); abort what uses them, then update"
SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=4)


@pytest.fixture
def ours() -> Context:
    pool = KVPool(SHAPE, 1, 1, 8, torch.float32, "cpu")
    return Context(EllmConfig(), PageTable(SHAPE, 8, 16), pool, 64)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the schedulers here: from SGLang 0.5.23 on a real one is needed to ask."""
    monkeypatch.setattr(type(adapter()), "ranks", lambda _, scheduler: scheduler.ps)


def updater_of(ours: Context, ranks: int = 1) -> Any:
    """SGLang's updater, as far as eLLM looks at it."""
    place = SimpleNamespace(tp_size=ranks, tp_rank=0, dp_rank=None)
    return SimpleNamespace(scheduler=scheduler_of(ours, ps=place))


def scheduler_of(ours: Context, **attributes: Any) -> Any:
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(ellm=ours), **attributes)


def requests() -> list[Any]:
    from sglang.srt.managers import io_struct

    return [
        io_struct.UpdateWeightFromDiskReqInput(model_path="new"),
        io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[]),
        io_struct.UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[]),
        io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}),
        io_struct.CheckWeightsReqInput(action="reset_tensors"),
    ]


def test_every_kind_of_update_is_refused_in_its_own_words(ours: Context) -> None:
    from sglang.srt.managers import io_struct

    ours.table.map(3, ours.table.allocate(1), 4)
    updater = updater_of(ours)
    for request, answer in zip(
        requests(),
        (
            io_struct.UpdateWeightFromDiskReqOutput,
            io_struct.UpdateWeightsFromTensorReqOutput,
            io_struct.UpdateWeightsFromDistributedReqOutput,
            io_struct.UpdateWeightsFromIPCReqOutput,
            io_struct.CheckWeightsReqOutput,
        ),
        strict=True,
    ):
        hook = weights.check if answer is io_struct.CheckWeightsReqOutput else weights.update
        said = hook(pytest.fail, updater, request)
        assert type(said) is answer and not said.success
        assert "in use (requests: 1)" in said.message


def test_blocks_that_cannot_be_dropped_refuse_it_too(ours: Context) -> None:
    ours.table.allocate(2)
    updater = updater_of(ours)
    for request in requests()[:4]:
        assert weights.update(pytest.fail, updater, request).message == BLOCKS


def fails(*_: Any) -> Any:
    raise KeyError("no such group")


def test_an_update_that_fails_is_answered(ours: Context) -> None:
    for request in requests()[:4]:
        said = weights.update(fails, updater_of(ours), request)
        assert not said.success and "no such group" in said.message
        assert "weights may be new in part" in said.message


@pytest.mark.parametrize("others", [True, False])
def test_with_several_ranks_an_update_from_disk_is_all_ranks_or_none(
    ours: Context, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In others SGLang's ranks wait for one another, so one that fails may not go on."""
    monkeypatch.setattr(weights, "least_of_ranks", lambda _, mine: [min(*mine, int(others))])
    disk, *others_of_it = requests()[:4]
    done = SimpleNamespace(success=True, message="")
    said = weights.update(lambda *_: done, updater_of(ours, 2), disk)
    assert said is done if others else "another rank could not" in said.message
    assert "no such group" in weights.update(fails, updater_of(ours, 2), disk).message
    for request in others_of_it:
        with pytest.raises(KeyError):
            weights.update(fails, updater_of(ours, 2), request)


def test_weights_are_looked_at_whatever_runs(ours: Context) -> None:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    ours.table.map(3, ours.table.allocate(1), 4)
    updater = updater_of(ours)
    looked = weights.check(lambda *_: "looked", updater, CheckWeightsReqInput(action="checksum"))
    assert looked == "looked"


def test_a_session_of_updates_begins_and_ends_without_kv(ours: Context) -> None:
    """From 0.5.23; each part of it is an update like any other."""
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "BeginWeightUpdateReqInput"):
        pytest.skip("this SGLang has no sessions")
    updater = updater_of(ours)
    for name in ("BeginWeightUpdate", "EndWeightUpdate"):
        request = getattr(io_struct, f"{name}ReqInput")()
        assert weights.update(lambda *_: "went on", updater, request) == "went on"
    ours.table.map(3, ours.table.allocate(1), 4)
    for name in ("BeginWeightUpdate", "EndWeightUpdate"):
        said = weights.update(pytest.fail, updater, getattr(io_struct, f"{name}ReqInput")())
        assert type(said) is getattr(io_struct, f"{name}ReqOutput") and not said.success
        assert "in use (requests: 1)" in said.message


@pytest.mark.parametrize("outcome", [(), (True, "updated")])
def test_the_cache_is_not_flushed_while_requests_wait(outcome: tuple[Any, ...]) -> None:
    """And the update has gone well all the same; 0.5.23 asks with its outcome and wants it back."""
    request = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
    busy, idle = (SimpleNamespace(is_fully_idle=lambda idle=idle: idle) for idle in (False, True))
    assert weights.flush(pytest.fail, busy, request, *outcome) == (outcome or None)
    asked: list[Any] = []
    weights.flush(lambda *given: asked.append(given), idle, request, *outcome)
    assert asked == [(idle, request, *outcome)]


def test_an_update_goes_on_where_nothing_is_held(ours: Context) -> None:
    updater = updater_of(ours)
    for request in requests():
        assert weights.update(lambda *_: "updated", updater, request) == "updated"


class Request:
    """As much of SGLang's `Req` as the request table asks for."""

    priority = None
    sampling_params = SimpleNamespace(custom_params=None, max_new_tokens=64)

    def __init__(self, output: int) -> None:
        self.origin_input_ids = [1] * 10
        self.output_ids = [1] * output


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_is_told_to_book_and_clock(ours: Context, mode: str) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    waiting: Any = Request(0)
    running: Any = Request(5)
    scheduler = scheduler_of(
        ours, waiting_queue=[waiting], schedule_low_priority_values_first=False
    )
    now = [100.0]
    steps = StepLog(RooflineLatencyModel(TINY, GPU), lambda: now[0])
    loop: Any = SimpleNamespace(steps=steps)
    iteration = Iteration(loop, ours.elastic, 1, lambda: now[0])
    ours.scheduler = side = EllmScheduler(iteration, scheduler)
    slots = side.entries([waiting, running])
    column = iteration.requests._columns
    column["waiting_since_s"][slots] = -1e6
    steps.start(StepWork(1, 4))
    iteration.in_step(slots[1:], np.array([15]))
    now[0] += 2
    retracts = mode == "retract"

    def pause(*_: Any) -> None:
        assert (column["last_token_s"][slots[1]] == now[0]) == retracts, "before it is retracted"
        if retracts:
            scheduler.waiting_queue.append(running)

    weights.pause(pause, scheduler, PauseGenerationReqInput(mode=mode))

    assert (column["waiting_since_s"][slots] == -1e6).tolist() == [True, not retracts]
    came = now[0]
    now[0] += 3600
    iteration.report()
    assert column["last_token_s"][slots[1]] == (came if retracts else now[0])
    assert column["tokens"][slots].tolist() == [10, 15]
    steps.start(StepWork(1, 4))
    assert [step.seconds for step in steps.reports] == [2.0]


def test_while_memory_is_released_a_pause_and_its_end_are_kept_for_later(ours: Context) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    scheduler = scheduler_of(ours, waiting_queue=[])
    loop: Any = SimpleNamespace(steps=StepLog(RooflineLatencyModel(TINY, GPU)))
    ours.scheduler = side = EllmScheduler(Iteration(loop, ours.elastic, unit_bytes=1), scheduler)
    side.released = Released(units=8, paused=False)
    for mode in ("in_place", "retract"):
        weights.pause(lambda *_: None, scheduler, PauseGenerationReqInput(mode=mode))
        assert side.released == Released(8, paused=True)
        occupation.go_on(pytest.fail, scheduler, ContinueGenerationReqInput())
        assert side.released == Released(8, paused=False)
    side.released = None
    told: list[Any] = []
    occupation.go_on(lambda *given: told.append(given), scheduler, "on")
    assert told == [(scheduler, "on")]
