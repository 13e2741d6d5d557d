"""Memory that KV and activations share, prompts computed into host memory, mixed steps, and the
decoding half of two instances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ellm_sgl.client.traces import Trace
from ellm_sgl.config import ConfigError
from ellm_sgl.engine.host_buffer import HostBuffer
from ellm_sgl.eval.simulator import Load, Settings, Simulation, preset, simulate
from ellm_sgl.eval.simulator.balloon import Balloon, BalloonAdmission
from ellm_sgl.eval.simulator.load import Progress, VirtualClock
from ellm_sgl.eval.simulator.modes import Chunk, HostStore
from ellm_sgl.memory import PageTable, PoolShape

BLOCK = 16
L4 = preset("llama3-8b")
EACH = 0.5
"""Tokens of KV whose memory a row takes."""
SHARED: dict[str, Any] = {"admission": "vllm", "chunk_tokens": 10**6, "max_running": 64}
WAYS = {
    "whole": Settings("recompute", **SHARED),
    "shared": Settings("recompute", activation_tokens=EACH, **SHARED),
    "host": Settings("swap", activation_tokens=EACH, **SHARED),
    "alg. 2": Settings("swap", activation_tokens=EACH, host_scaling=True, **SHARED),
    "mixed": Settings("recompute", mixed_chunks=True, **(SHARED | {"chunk_tokens": 256})),
    "prefilled": Settings("swap", prefilled=True, **SHARED),
}


def balloon(blocks: int, prompts: list[int], host_blocks: float, buffer: HostBuffer | None = None):
    """Nobody runs; the clock stands."""
    count = len(prompts)
    load = Load.of(Trace(np.zeros(count), np.array(prompts), np.full(count, 9)), None, 1.0, 1.0)
    table = PageTable(PoolShape(1, 1, BLOCK), blocks, blocks)
    host = HostStore(lambda tokens: 0.0, host_blocks * BLOCK) if host_blocks else None
    return Balloon(table, load, Progress(load), VirtualClock(), host, EACH, buffer)


def burst(count: int, prompt: int = 512, output: int = 256) -> Load:
    trace = Trace(
        np.linspace(0.0, 0.01 * (count - 1), count), np.full(count, prompt), np.full(count, output)
    )
    return Load.of(trace, None, 0.2, 1.0)


@pytest.mark.parametrize(
    ("blocks", "host", "joins", "offloaded"),
    [
        (1000, 0, True, False),  # 100 blocks of KV, 50 of activations, 10 of watermark, 700 in use
        (860, 0, True, False),
        (850, 0, False, False),
        (850, 100, True, True),
        (850, 99, False, False),
        (758, 100, True, True),
        (756, 100, False, False),
    ],
)
def test_a_prompt_joins_with_its_activations_or_goes_to_the_host(blocks, host, joins, offloaded):
    mode = balloon(blocks, [700 * BLOCK, 100 * BLOCK], host)
    mode.enter(Chunk(0, 0, 700 * BLOCK, last=True))
    chunks = BalloonAdmission(mode, 10**6, 9).admit([0], [1], anybody_waits=True)
    assert [c.request for c in chunks] == [1] * joins
    assert mode.computed_into_host(1) is offloaded
    assert mode.progress.on_host[1] == offloaded


def test_all_prompts_of_a_step_need_their_activations_at_once():
    mode = balloon(310, [100 * BLOCK] * 3, 0)
    chunks = BalloonAdmission(mode, 10**6, 9).admit([], range(3), anybody_waits=True)
    assert len(chunks) == 2  # 2 x 150 of 310 less 3
    assert balloon(9, [1], 0).activation_blocks(33) == 2


def test_room_is_kept_for_activations_while_the_host_takes_prompts():
    mode = balloon(1000, [700 * BLOCK, 100 * BLOCK], 100)
    mode.enter(Chunk(0, 0, 700 * BLOCK, last=True))
    assert mode.decide([0], np.array([1])).admit == [1]
    assert mode.spare_blocks == 300 - 50 - 10
    mode.progress.on_host[1] = True
    mode.decide([0], np.array([1]))
    assert mode.spare_blocks == 300


def test_alg_2_lets_prompts_go_to_the_host_once_first_tokens_are_late():
    mode = balloon(1000, [700 * BLOCK, 4 * BLOCK], 100, HostBuffer(1.0))
    for now_s in (0.0, *[2.0] * 30):
        mode._clock.now_s = now_s
        mode.decide([], np.array([1]))
        if now_s == 0:
            assert mode.host_room() <= 1
    assert mode.host_room() == 100


def test_alg_2_looks_once_a_step_however_many_are_simulated_at_once():
    rooms = []
    for at_once in (1, 6, 12):
        mode = balloon(1000, [700 * BLOCK, 100 * BLOCK], 100, HostBuffer(1.0))
        mode._clock.now_s = 2.0  # its first token is late
        for _ in range(12 // at_once):
            mode.decide([], np.array([1]))
            mode.decoded(np.array([0]), at_once)
        mode.decide([], np.array([1]))
        rooms.append(mode.host_room())
    assert 1 < rooms[0] == rooms[1] == rooms[2] < 100


@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_its_tokens_in_whatever_memory(way):
    load = burst(12)
    simulation = Simulation(L4.limited(4000, None), WAYS[way], load)
    simulation.run()
    assert simulation.progress.generated.tolist() == load.output_tokens.tolist()
    assert not simulation.progress.on_host.any()
    assert simulation.mode.free_blocks == simulation.mode.table.num_blocks
    gaps = simulation.record.gaps_s
    assert (gaps > 0).all() and simulation.record.ended == len(load)


def test_prompts_in_host_memory_have_their_first_tokens_sooner_and_the_others_later():
    static, shared, host = (
        simulate(L4.limited(4000, None), WAYS[way], burst(12)).summary
        for way in ("whole", "shared", "host")
    )
    assert host.ttft.mean < 0.5 * min(static.ttft.mean, shared.ttft.mean)
    assert host.tpot.mean > max(static.tpot.mean, shared.tpot.mean)


def test_those_that_decode_go_on_while_a_prompt_is_computed_in_mixed_steps():
    trace = Trace(np.array([0.0, 0.5]), np.array([64, 4096]), np.array([100, 2]))
    longest, first = {}, {}
    for way in ("whole", "mixed"):
        simulation = Simulation(L4, WAYS[way], Load.of(trace))
        simulation.run()
        longest[way] = simulation.record.gaps_s.max()
        first[way] = simulation.progress.first_s[1]
        assert simulation.progress.generated.tolist() == [100, 2]
    assert longest["mixed"] < 0.5 * longest["whole"]
    assert first["mixed"] > first["whole"]  # 4,096 rows in steps of 256 that read all weights


def test_a_decoding_instance_computes_no_prompts():
    report = simulate(L4.limited(4000, None), WAYS["prefilled"], burst(12))
    assert report.recomputed_prompt_share == -1
    assert report.summary.ttft.mean == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mode": "ellm", "mixed_chunks": True}, "for baselines with admission vllm"),
        ({"mode": "swap", "activation_tokens": 1.0}, "for baselines with admission vllm"),
        ({"mode": "swap", "admission": "vllm", "activation_tokens": math.nan}, "tokens"),
        ({"mode": "recompute", "admission": "vllm", "prefilled": True}, "in mode swap"),
        ({"mode": "swap", "admission": "vllm", "prefilled": True, "mixed_chunks": True}, "one"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(given, says):
    with pytest.raises((ConfigError, ValueError), match=says):
        Settings(**given)
