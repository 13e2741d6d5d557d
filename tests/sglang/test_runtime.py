"""What a step leaves behind in the process's runtime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.control import ElasticMemory, StepLog
from ellm_sgl.forward import StepPlan, Streamer
from ellm_sgl.forward.restoration import GroupTransfer
from ellm_sgl.kv import KVPool, PageTable, PoolShape
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.sglang.runtime import Runtime
from tests.forward.tiny import HEAD_DIM, KV_HEADS, TinyDecoder
from tests.latency.machines import GPU, TINY

SHAPE = PoolShape(num_layers=2, layer_group=1, block_tokens=4)


def test_a_steps_wait_for_the_host_tier_is_its_own_and_the_servers() -> None:
    table = PageTable(SHAPE, 8, 8, host_units=8)
    pool, host = (KVPool(SHAPE, 8, KV_HEADS, HEAD_DIM, torch.float32, "cpu") for _ in range(2))
    streamer = Streamer(host.buffer, pool.buffer, slots=2, overlap=False)
    elastic = ElasticMemory(table, 64, lambda tokens: 0, streamer.save)
    runtime = Runtime(EllmConfig(), table, pool, elastic, streamer)
    steps = StepLog(RooflineLatencyModel(TINY, GPU))
    loop: Any = SimpleNamespace(loop=SimpleNamespace(steps=steps))
    runtime.deciding = loop
    runner: Any = SimpleNamespace(model=SimpleNamespace(model=TinyDecoder(2, 8)))
    transfer = GroupTransfer(torch.tensor([1]), torch.tensor([2]))
    plan = StepPlan(1, torch.empty(0), torch.empty(0), (), transfers=(transfer,) * 2)
    for _ in range(2):
        steps.start(StepWork(1, 4))
        with runtime.running(runner, plan):
            streamer.wait(0)
            streamer.wait(1)
    steps.idle()
    stalls = [report.swap_stall_s for report in steps.reports]
    assert len(stalls) == 2 and min(stalls) > 0
    assert sum(stalls) == elastic.totals.swap_stall_s
