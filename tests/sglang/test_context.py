"""What a step leaves behind in the process that ran it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.engine import Controller, InForce, Iteration, ServerLimits, StepLog
from ellm_sgl.latency import HardwareProfile, RooflineLatencyModel, StepWork
from ellm_sgl.memory import KVPool, PageTable, PoolShape
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.policies import Stock
from ellm_sgl.sglang.context import Context
from ellm_sgl.step import StepPlan, Streamer
from ellm_sgl.step.restoration import GroupTransfer
from tests.latency.machines import GPU, TINY
from tests.step.tiny import HEAD_DIM, KV_HEADS, TinyDecoder

SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=4)


def iteration_of(ours: Context, steps: StepLog, hardware: HardwareProfile = GPU) -> Iteration:
    limits = ServerLimits(TINY, hardware, 8, math.inf, 64)
    loop = Controller(Stock(), math.inf, steps, limits)
    return Iteration(loop, ours.elastic, ours.pool.unit_bytes)


def test_a_steps_wait_for_the_host_tier_is_its_own_and_the_servers() -> None:
    table = PageTable(SHAPE, 8, 8, host_units=8)
    pool, host = (KVPool(SHAPE, 8, KV_HEADS, HEAD_DIM, torch.float32, "cpu") for _ in range(2))
    streamer = Streamer(host.buffer, pool.buffer, slots=2, overlap=False)
    ours = Context(EllmConfig(), table, pool, 64, streamer=streamer)
    ours.attach(TinyDecoder(2, 8))
    steps = StepLog(RooflineLatencyModel(TINY, GPU))
    iteration = iteration_of(ours, steps)
    transfer = GroupTransfer(torch.tensor([1]), torch.tensor([2]))
    work = StepWork(1, 4)
    plan = StepPlan(1, torch.empty(0), torch.empty(0), (), transfers=(transfer,) * 2)
    for _ in range(2):
        with iteration.execute(ours.executor, plan, work):
            streamer.wait(0)
            streamer.wait(1)
    iteration.idle()
    stalls = [report.swap_stall_s for report in steps.reports]
    assert len(stalls) == 2 and min(stalls) > 0
    assert sum(stalls) == ours.elastic.totals.swap_stall_s


def to_resume(steps: Any) -> tuple[Context, Iteration]:
    """Request 2 has given up its KV, and is to come back while 1 decodes: 12.5 units a step."""
    table = PageTable(SHAPE, 100, 80, host_units=160)
    pool, host = (KVPool(SHAPE, n, 1, 4, torch.float32, "cpu") for n in (80, 160))
    streamer = Streamer(host.buffer, pool.buffer, slots=2, overlap=False)
    ours = Context(EllmConfig(host_kv_tokens=320), table, pool, 4096, streamer=streamer)
    elastic = ours.elastic
    for seq_id, blocks in ((1, 8), (2, 30)):
        new = elastic.allocate(blocks)
        table.map(seq_id, new, blocks * SHAPE.block_tokens)
        table.note_computed([seq_id], [blocks * SHAPE.block_tokens])
    for ratio in (0.99, 0.01):
        elastic.bring_to_ratios([2], [ratio], paused=True)
    link: Any = SimpleNamespace(link_bytes_per_s=12.5 * pool.unit_bytes / 0.005)
    iteration = iteration_of(ours, steps, link)
    iteration.in_force = InForce(fetch_ahead_s=0.005)
    return ours, iteration


def test_ranks_whose_clocks_differ_fetch_the_same_ahead() -> None:
    """How much comes with rank 0's decision; what a rank has measured itself has no part in it."""
    tables: list[IntArray] = []
    for measured_s in (0.010, 0.0103):
        steps: Any = SimpleNamespace(last=SimpleNamespace(seconds=measured_s), model=None)
        ours, iteration = to_resume(steps)
        iteration.plan_decode(ours.planner, [1], paused=[2])
        assert ours.elastic.totals.fetched_ahead_units == 12
        tables.append(ours.table.units)
    assert (tables[0] == tables[1]).all()


def test_cached_prefixes_make_way_for_who_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's free units alone: the policy counts what nobody uses as room."""
    steps: Any = SimpleNamespace(last=SimpleNamespace(seconds=0.01), model=None)
    ours, iteration = to_resume(steps)
    table = ours.table
    cached = table.allocate(table.free_units // SHAPE.num_groups).tolist()
    table.place(np.array(cached, np.int32))
    free = table.free_units

    def reclaim(tokens: int) -> int:
        blocks = [cached.pop() for _ in range(min(SHAPE.blocks_for(tokens), len(cached)))]
        table.release(blocks)
        return len(blocks) * SHAPE.block_tokens

    monkeypatch.setattr(ours.elastic, "_reclaim", reclaim)
    plan = iteration.plan_decode(ours.planner, [1], paused=[2])
    assert free < SHAPE.num_groups and ours.elastic.totals.fetched_ahead_units == 12
    assert plan.fetched_ahead is not None and cached
    table.check_integrity()


def test_what_the_store_may_have_under_way_is_nobody_elses() -> None:
    pool = KVPool(SHAPE, 8, 1, 4, torch.float32, "cpu")
    memory = Context(EllmConfig(), PageTable(SHAPE, 8, 8), pool, 64).memory
    assert memory.describe().kv_store == 0
    before, memory.store = memory._promised(), 128 << 20
    assert memory._promised() - before == memory.describe().kv_store == 128 << 20
    memory.queued = lambda: 100 << 20  # which is not free any more
    assert memory._promised() - before == 28 << 20
