"""Hidden states: captured once per block, projected to the KV that the layer had computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from ellm_sgl.memory import NONE, ElasticMemory, HiddenPool, KVPool, PageTable, PoolShape
from ellm_sgl.step import (
    HiddenStates,
    Missing,
    NewTokens,
    StepPlan,
    Streamer,
    plan_restoration,
    plan_step,
)
from ellm_sgl.step.hidden import plan_capture
from ellm_sgl.step.rows import MixedRows
from tests.step.tiny import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    TinyDecoder,
    TinyLayer,
    attend_paged,
    compute_fully,
)

SHAPE = PoolShape(num_layers=5, layer_group=2, block_tokens=4)
VOCABULARY = 50


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Server:
    """One sequence on a small pool with a host tier, step by step."""

    def __init__(self, hidden_groups: int, host_blocks: int, overlap: bool = True) -> None:
        torch.manual_seed(0)
        host_units = host_blocks * SHAPE.num_groups
        self.table = PageTable(SHAPE, 12, 24, host_units, hidden_groups)
        self.pool = self._pool(24)
        states = HiddenPool(
            SHAPE, hidden_groups, self.table.host._slots.capacity, HIDDEN, torch.float32
        )
        states.buffer.fill_(torch.nan)
        self.hidden = HiddenStates(states, self.pool)
        self.streamer = Streamer(
            self._pool(self.table.host.kv_units).buffer, self.pool.buffer, 2, overlap,
            project=self.hidden.restore,
        )  # fmt: skip
        self.elastic = ElasticMemory(self.table, 1000, lambda _: 0, self.streamer.save)
        self.decoder = TinyDecoder(SHAPE.num_layers, VOCABULARY)
        self.rows = MixedRows(self.decoder, SHAPE)
        inputs = [m.qkv for m in self.decoder.layers if isinstance(m, TinyLayer)]
        self.hidden.attach(inputs[: self.hidden.num_layers], self._project)
        self.tokens: list[int] = []
        self.projected, self.recomputed = 0, 0

    def _pool(self, units: int) -> KVPool:
        pool = KVPool(SHAPE, units, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
        pool.buffer.fill_(torch.nan)
        return pool

    def _project(
        self, layer: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.decoder.layers[layer]
        assert isinstance(module, TinyLayer)
        qkv = linear(states, module.qkv.weight, module.qkv.bias)
        _, k, v = module.project(qkv, positions)
        return k, v

    def step(self, tokens: list[int], share: float = 0.0, restore: bool = True) -> torch.Tensor:
        """Hidden states of the new tokens, behind the last norm."""
        table, start = self.table, len(self.tokens)
        self.tokens += tokens
        end = len(self.tokens)
        added = self.elastic.allocate(SHAPE.blocks_for(end) - SHAPE.blocks_for(start))
        if start:
            table.extend(0, end, added)
        else:
            table.map(0, added, end)
        missing = Missing.of(table, [0])
        if restore:
            self.elastic.restore([0], missing.blocks)
        restoration = plan_restoration(table, missing, share, 2)
        new = [NewTokens(0, start, end)]
        plan = plan_step(table, new, restoration, lambda _, a, b: np.array(self.tokens[a:b]))
        self.projected += restoration.projected_units
        self.recomputed += plan.recomputed_rows
        out = self._run(plan, start)
        table.return_units(restoration.borrowed)
        table.check_integrity()
        return out

    def _run(self, plan: StepPlan, start: int) -> torch.Tensor:
        attend_to_pool = attend_paged(plan, self.pool)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layer % SHAPE.layer_group == 0:
                self.streamer.wait(SHAPE.group_of(layer))
            out = attend_to_pool(layer, q, k, v)
            if SHAPE.ends_group(layer):
                self.streamer.done(SHAPE.group_of(layer))
            return out

        capture = plan_capture(self.table, [0], plan)
        self.table.note_computed([0], [plan.new_rows])
        tokens, positions = torch.tensor(self.tokens[start:]), torch.arange(start, len(self.tokens))
        with self.streamer.running(plan.transfers), self.hidden.capturing(capture), \
             self.rows.running(plan):  # fmt: skip
            out: torch.Tensor = self.decoder(tokens, positions, attend)
        return out

    def expected(self, count: int) -> torch.Tensor:
        """What `step` should have returned for the last `count` tokens."""
        return compute_fully(self.decoder, self.tokens)[0][-count:]


@pytest.mark.parametrize("hidden_groups", [1, 2, 3])
@pytest.mark.parametrize("host_blocks", [0, 3, 12])
@pytest.mark.parametrize("seed", range(2))
def test_generation_with_evictions_is_generation_without(
    hidden_groups: int, host_blocks: int, seed: int
) -> None:
    """With room for all hidden states, for some blocks', and for none."""
    random = np.random.default_rng(seed)
    server = Server(hidden_groups, host_blocks, overlap=bool(seed))
    while len(server.tokens) < 40:
        count = int(random.choice([1, 1, 1, 6]))
        out = server.step(
            random.integers(0, VOCABULARY, count).tolist(),
            share=float(random.choice([0.0, 0.34, 0.67])),
            restore=bool(random.integers(2)),
        )
        torch.testing.assert_close(out, server.expected(count), rtol=0, atol=1e-5)
        server.elastic.bring_to_ratios([0], [float(random.choice([0.0, 0.5, 0.9]))])
    assert (server.projected > 0) == (host_blocks > 0)
    if host_blocks == 12:  # whatever is wanted again is there: only the share is recomputed
        assert server.table.depth(server.table.blocks_of(0)[:-1]).max() == 0


def test_a_block_is_a_copy_once_it_is_full() -> None:
    server = Server(hidden_groups=3, host_blocks=12)
    server.step(list(range(6)))
    host, (first, second) = server.table.host, server.table.blocks_of(0).tolist()
    assert (host.units[first] != NONE).all() and (host.units[second] == NONE).all()
    server.step([6])
    assert (host.units[second] == NONE).all() and host.filling[second] != NONE
    server.step([7])
    assert (host.units[second] != NONE).all() and host.filling[second] == NONE


def test_a_block_begun_without_room_is_not_captured_in_part() -> None:
    server = Server(hidden_groups=3, host_blocks=1)
    server.step(list(range(6)))
    server.table.host.drop(server.table.blocks_of(0)[:1])  # there is room again
    server.step([6, 7])
    assert (server.table.host.units[server.table.blocks_of(0)] == NONE).all()


def test_what_is_recomputed_for_want_of_a_copy_gets_one() -> None:
    server = Server(hidden_groups=2, host_blocks=12)
    server.step(list(range(8)))
    blocks = server.table.blocks_of(0).copy()
    server.table.host.drop(blocks)
    server.elastic.bring_to_ratios([0], [0.5])
    out = server.step([8], restore=False)
    torch.testing.assert_close(out, server.expected(1), rtol=0, atol=1e-5)
    assert server.recomputed == 4
    assert (server.table.host.units[blocks[0], :2] != NONE).all()
    assert (server.table.host.units[blocks[1]] == NONE).all()


def test_without_a_step_under_way_nothing_is_captured() -> None:
    server = Server(hidden_groups=3, host_blocks=12)
    compute_fully(server.decoder, [1, 2, 3])
    assert server.hidden._states.buffer.isnan().all()
