"""vLLM's admission, the eLLM paper's cap on it, and host memory that has a bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.client.traces import Trace
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.eval.simulator import Load, Settings, Simulation, preset, simulate
from ellm_sgl.eval.simulator.admission import PaperAdmission, VllmAdmission
from ellm_sgl.eval.simulator.load import Progress, VirtualClock
from ellm_sgl.eval.simulator.modes import Chunk, Mode
from ellm_sgl.eval.simulator.settings import ADMISSIONS, device_model
from ellm_sgl.latency import StepWork
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.serve import cli_simulate

BLOCK = 16
L4 = preset("llama3-8b")
MODEL = device_model(L4, Settings())


def server(blocks: int, prompts: Sequence[int], running: int, slo_s: float = math.inf) -> Mode:
    """The first `running` of these requests are prefilled, and have had a token just now."""
    count = len(prompts)
    load = Load.of(Trace(np.zeros(count), np.array(prompts), np.full(count, 9)), None, slo_s)
    mode = Mode(PageTable(PoolShape(1, 1, BLOCK), blocks, blocks), load, Progress(load))
    for i in range(running):
        mode.enter(Chunk(i, 0, prompts[i], last=True))
        mode.progress.first_s[i] = mode.progress.last_s[i] = 0.0
        mode.progress.generated[i] = 1
    return mode


def admitted(admission: VllmAdmission, running: int, count: int) -> list[int]:
    chunks = admission.admit(range(running), range(running, count), running < count)
    return [chunk.request for chunk in chunks]


@given(
    prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    fitting=st.integers(1, 30),
    spare=st.integers(0, 20),
    running=st.integers(0, 1),
    places=st.integers(1, 20),
)
def test_as_many_of_the_first_join_as_the_watermark_leaves_room_for(
    prompts, fitting, spare, running, places
):
    blocks = sum(-(-n // BLOCK) for n in prompts[:fitting]) + spare
    mode = server(blocks, prompts, running)
    joined = admitted(VllmAdmission(mode, 10**6, places), running, len(prompts))
    free = mode.free_blocks - np.cumsum([-(-n // BLOCK) for n in prompts[running:]])
    fits = free >= blocks // 100
    fits[: 1 - running] = True  # alone, it may have all
    count = min(int(fits.sum()), max(places - running, 0))
    assert joined == list(range(running, running + count))


@pytest.mark.parametrize("chunk_tokens", [64, 100, 8192])
@pytest.mark.parametrize("mode", ["recompute", "swap", "hcache"])
def test_ample_memory_makes_all_ways_alike(mode, chunk_tokens):
    trace = paper_workload("sharegpt", 30, 0, per_second=4.0).scaled(lengths=0.15)
    settings = Settings(mode, stride=1, chunk_tokens=chunk_tokens)
    ways = [dataclasses.replace(settings, admission=way) for way in ADMISSIONS]
    sglang, *others = (simulate(L4, way, Load.of(trace)).summary for way in ways)
    assert all(summary == sglang for summary in others)


def test_nothing_is_set_aside_for_outputs():
    load = Load.of(Trace(np.zeros(2), np.full(2, 64), np.full(2, 50)), max_new_tokens=2500)
    small = L4.limited(3000, None)
    one, both = (simulate(small, Settings("recompute", admission=a), load) for a in ADMISSIONS[:2])
    assert (one.running_mean, both.running_mean) == (1.0, 2.0)
    assert (one.running_most, both.running_most) == (1, 2)

    decoded = [
        found.decode_tokens_per_s * found.decode_steps * found.decode_step_s
        for found in (one, both)
    ]
    assert decoded == pytest.approx([98, 98])


def test_a_prompt_under_way_keeps_the_blocks_of_its_rest():
    mode = server(20, [304, 16, 16], 0)
    admission = VllmAdmission(mode, 176, 8)
    for chunk in (Chunk(0, 0, 176, False), Chunk(0, 176, 304, True)):
        chunks = admission.admit((), range(1 if chunk.begin else 0, 3), True)
        assert chunks[0] == chunk
        mode.enter(chunk)
    assert chunks[1:] == (Chunk(1, 0, 16, True),)  # the one block that is left


def test_who_came_last_goes_and_is_the_first_to_join_again():
    """Three requests outgrow the memory; a fourth waits for a place, and would fit. As SGLang has
    it, it joins when one loses its place; as vLLM, after that one, which only fits once another
    has ended."""
    arrivals, prompts = np.array([0, 0.2, 0.4, 0.6]), np.array([128, 128, 128, 32])
    load = Load.of(Trace(arrivals, prompts, np.array([100, 100, 70, 4])))
    settings = Settings("recompute", stride=1, conservativeness=0.02, max_running=3)
    runs = {}
    for way in ("sglang", "vllm"):
        run = Simulation(L4.limited(512, None), dataclasses.replace(settings, admission=way), load)
        run.run()
        assert run.record.retractions == 1
        assert run.progress.generated.tolist() == load.output_tokens.tolist()
        runs[way] = run.progress
    assert runs["sglang"].last_s[3] < runs["sglang"].last_s[0]
    assert runs["vllm"].first_s[3] > runs["vllm"].last_s[0]
    admission = VllmAdmission(server(20, [16] * 5, 4), 64, 8)
    assert admission.victim([3, 0, 2]) == 3
    assert admission.queue_again(3, np.array([4]), [0, 2]).tolist() == [3, 4]


def test_within_the_papers_cap_steps_keep_the_slo():
    """Forty requests to their ends keep it, and there is memory for twice as many and more."""
    slo_s = float(MODEL.step_seconds(StepWork(40, 40.0 * (256 + 3))))
    load = Load.of(Trace(np.zeros(100), np.full(100, 256), np.full(100, 3)), tpot_slo_s=slo_s)
    settings = Settings("recompute", stride=1, chunk_tokens=100 * 256)
    vllm, paper = (
        simulate(L4, dataclasses.replace(settings, admission=way), load)
        for way in ("vllm", "paper")
    )
    assert (vllm.decode_steps, vllm.summary.slo_attainment) == (2, 0.0)
    assert (paper.decode_steps, paper.summary.slo_attainment) == (2 * 3, 1.0)


@pytest.mark.parametrize("of_server", [True, False])
def test_the_cap_counts_how_long_those_who_run_have_waited(of_server):
    step_s = float(MODEL.step_seconds(StepWork(6, 6.0 * 65)))
    mode = server(1000, [64] * 9, 3, math.inf if of_server else step_s)
    clock = VirtualClock()
    slo_s = step_s if of_server else math.inf
    admission = PaperAdmission(mode, 10**6, 99, MODEL, slo_s, clock)
    assert admitted(admission, 3, 9) == [3, 4, 5]
    mode.progress.last_s[3] = -60.0  # has lost its place a minute ago, but does not run
    assert admitted(admission, 3, 9) == [3, 4, 5]
    clock.now_s = step_s / 10
    assert admitted(admission, 3, 9) == []
    assert admitted(admission, 0, 9)[0] == 0  # it would be alone


def pressed() -> Load:
    return Load.of(paper_workload("sharegpt", 40, 0, per_second=4.0).scaled(lengths=0.15), 500)


@pytest.mark.parametrize("mode", ["swap", "hcache"])
def test_without_host_memory_swapping_is_recomputing(mode):
    machine = L4.limited(2000, 0)
    settings = Settings("recompute", admission="vllm")
    recomputed = simulate(machine, settings, pressed())
    swapped = simulate(machine, dataclasses.replace(settings, mode=mode), pressed())
    assert recomputed.retractions > 10
    assert dataclasses.replace(swapped, settings=settings, wall_s=recomputed.wall_s) == recomputed


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_the_host_has_no_room_for_is_recomputed(admission):
    settings = Settings("swap", admission=admission, conservativeness=0.02)
    simulation = Simulation(L4.limited(2000, 400), settings, pressed())
    most = 0

    def tick(ended: int) -> None:
        nonlocal most
        there = np.flatnonzero(simulation.progress.on_host).tolist()
        held = sum(-(-simulation.mode.prefill_tokens(i) // BLOCK) * BLOCK for i in there)
        most = max(most, held)

    simulation.run(tick)
    record, load = simulation.record, simulation.load
    assert 0 < most <= 400
    assert record.prefill_rows > load.prompt_tokens.sum()
    assert simulation.progress.generated.tolist() == load.output_tokens.tolist()
    ample = simulate(L4.limited(2000, None), settings, pressed())
    assert ample.retractions > 0 and ample.recomputed_prompt_share == 0


def test_the_command_line_names_them_all():
    assert cli_simulate.ADMISSIONS == ADMISSIONS
