"""Steps of a model whose pool shrinks and grows: outputs are those of a pool that never does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ellm_sgl.engine.decision import FETCH_ALL
from ellm_sgl.kernels.choose import choose_copy
from ellm_sgl.memory import ElasticMemory, KVPool, Outcome, PageTable, PoolShape, Resizer
from ellm_sgl.step import Executor, Planner
from tests.memory.fake_arena import FakeArena, small_steps
from tests.simulation.transfers import LateWorker
from tests.step.tiny import HEAD_DIM, KV_HEADS, TinyDecoder, attend_paged, compute_fully

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)
VOCABULARY, REQUESTS, BLOCKS = 50, 3, 40


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Server:
    """Requests of random tokens."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.decoder = TinyDecoder(SHAPE.num_layers, VOCABULARY)
        self.tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (REQUESTS, 60))
        units = BLOCKS * SHAPE.num_groups
        self.table = PageTable(SHAPE, 2 * BLOCKS, units)
        self.pool = KVPool(
            SHAPE, units, KV_HEADS, HEAD_DIM, torch.float32, "cpu", reserve=FakeArena
        )
        elastic = ElasticMemory(self.table, 1000, lambda _: 0)
        self.elastic = elastic
        self.planner = Planner(elastic, lambda s, a, b: self.tokens[s][a:b], "cpu", captures=False)
        self.executor = Executor(self.table, None, None, fusion=True)
        self.executor.attach(self.decoder)
        self.worker = LateWorker()
        self.worker.patience = 2
        self.resizer = Resizer(elastic, self.pool, choose_copy(), self.worker.submit, agree=list)

    def step(self, begin: int, end: int) -> torch.Tensor:
        """Tokens [begin, end) of each request; behind the last norm, [REQUESTS, tokens, hidden]."""
        table, blocks = self.table, SHAPE.blocks_for
        for s in range(REQUESTS):
            added = self.elastic.allocate(blocks(end) - blocks(begin))
            if begin:
                table.extend(s, end, added)
            else:
                table.map(s, added, end)
        if begin:
            plan = self.planner.decode(range(REQUESTS), FETCH_ALL)
        else:
            plan = self.planner.extend(range(REQUESTS), [end] * REQUESTS, FETCH_ALL)
        tokens = torch.from_numpy(self.tokens[:, begin:end].reshape(-1))
        positions = torch.arange(begin, end).repeat(REQUESTS)
        with self.executor.execute(plan):
            out: torch.Tensor = self.decoder(tokens, positions, attend_paged(plan, self.pool))
        self.worker.pass_time()
        return out.view(REQUESTS, end - begin, -1)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_do_not_depend_on_the_size_of_the_pool(seed: int) -> None:
    server, random = Server(seed), np.random.default_rng(seed)
    expected = torch.stack([compute_fully(server.decoder, t)[0] for t in server.tokens])
    sizes, outcomes = set(), set()
    with small_steps(5 * server.pool.unit_bytes):
        server = Server(seed)
        begin = 0
        for end in (9, *range(10, 61)):
            out = server.step(begin, end)
            torch.testing.assert_close(out, expected[:, begin:end], rtol=0, atol=1e-5)
            begin = end
            server.resizer.step()
            if random.random() < 0.2:
                blocks = int(random.integers(1, BLOCKS + 1))
                server.resizer.ask(blocks * SHAPE.num_groups)
            server.table.check_integrity()
            sizes.add(server.table.committed_units)
            outcomes.add(server.resizer.outcome)
    totals = server.elastic.totals
    assert totals.relocated_units and totals.evicted_units and totals.recomputed_tokens
    assert len(sizes) > 5 and {Outcome.APPLIED, Outcome.UNDER_WAY} <= outcomes
