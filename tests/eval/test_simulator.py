"""The simulator: same seed, same result; every request gets what it asked for; nothing leaks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from ellm_sgl.client.traces import Trace
from ellm_sgl.client.workloads import paper_workload
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.simulator import MODES, Load, Settings, Simulation, preset, simulate
from ellm_sgl.eval.simulator import settings as settings_module
from ellm_sgl.eval.simulator.admission.sglang import SglangAdmission
from ellm_sgl.eval.simulator.elastic import Elastic
from ellm_sgl.eval.simulator.report import sum_up
from ellm_sgl.eval.simulator.restoring import RestoringModel
from ellm_sgl.eval.simulator.settings import slower
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.policies import Batch, Fcfs, SystemState
from ellm_sgl.policies.baselines.whole_requests import WholeRequests

L4 = preset("llama3-8b").limited(3000, None)
"""Little memory, and a link that restores a third of it per step."""
SERVERS = [
    *(Settings(mode) for mode in MODES),
    Settings("ellm", restore="recompute"),
    Settings("ellm", "slo-priority", conservativeness=0.1),
    Settings("ellm", "stock", conservativeness=0.1),
    Settings("ellm", "fixed-ratio", {"ratio": 0.4}, "swap", layer_group=8),
    Settings("ellm", "fcfs", {"rotate": True}, "swap", tpot_slo_s=0.2),
    Settings("recompute", conservativeness=0.02),
    Settings("swap", conservativeness=0.02),
    Settings("hcache", conservativeness=0.02, chunk_tokens=128),
    Settings("recompute", admission="vllm", chunk_tokens=100),
    Settings("swap", admission="vllm"),
    Settings("hcache", admission="paper", tpot_slo_s=0.1),
    Settings("ellm", stride=1, max_running=7, tpot_slo_s=0.1, chunk_tokens=64),
]


def small_load(count: int = 40, seed: int = 0, max_new: int | None = 500) -> Load:
    trace = paper_workload("sharegpt", count, seed, per_second=4.0).scaled(lengths=0.15)
    return Load.of(trace, max_new, tpot_slo_s=0.1, ttft_slo_s=20.0)


def served(settings: Settings, load: Load) -> Simulation:
    simulation = Simulation(L4, settings, load)
    simulation.run()
    return simulation


def test_a_server_with_nothing_to_do_expects_outputs_as_at_first(monkeypatch):
    rested, seen = SglangAdmission.rested, []

    def noted(self):
        before = self._ratio.current
        rested(self)
        seen.append((before, self._ratio.current))

    monkeypatch.setattr(SglangAdmission, "rested", noted)
    trace = paper_workload("sharegpt", 4, 0, per_second=0.01).scaled(lengths=0.15)
    served(Settings("recompute"), Load.of(trace, 500, tpot_slo_s=0.1, ttft_slo_s=20.0))
    assert len(seen) == 2 and min(before for before, _ in seen) < 0.7
    assert {after for _, after in seen} == {0.7}


@pytest.mark.parametrize("settings", SERVERS, ids=lambda s: f"{s.mode}-{s.policy}-{s.restore}")
def test_every_request_gets_its_tokens_and_all_memory_comes_back(settings):
    load = small_load()
    simulation = served(settings, load)
    progress, table = simulation.progress, simulation.mode.table
    assert not progress.refused.any()
    assert progress.generated.tolist() == load.output_tokens.tolist()
    assert (progress.first_s > load.at_s).all() and (progress.last_s >= progress.first_s).all()
    table.check_integrity()
    assert table.used_units == 0 and table.free_blocks == table.num_blocks
    assert simulation.record.gaps_s.size == (load.output_tokens - 1).sum()
    assert (simulation.record.gaps_s > 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_result(mode):
    def run():
        report = simulate(L4, Settings(mode), small_load())
        return dataclasses.replace(report, wall_s=0.0)

    assert run() == run()
    assert simulate(L4, Settings(mode), small_load(seed=1)).summary != run().summary


def test_pressure_evicts_in_elastic_mode_and_retracts_in_the_others():
    load, small = small_load(), L4.limited(2000, None)
    elastic = simulate(small, Settings("ellm", "stock", conservativeness=0.02), load)
    assert elastic.retractions == 0 and elastic.uncached_share > 0
    for mode in ("recompute", "swap", "hcache"):
        whole = simulate(small, Settings(mode, conservativeness=0.02), load)
        assert whole.retractions > 0 and whole.uncached_share == 0
        assert (whole.recomputed_prompt_share > 0) == (mode == "recompute")


@pytest.mark.slow
def test_swapping_decides_as_the_servers_own_policy(monkeypatch):
    """Mode `swap` against the server's: `policies.baselines.whole_requests` over elastic memory.
    Twelve loads together: there a request that pauses keeps its last block, which shifts when
    memory runs out."""
    small = L4.limited(2000, None)
    settings = Settings("swap", stride=1, conservativeness=0.02)
    elastic = dataclasses.replace(
        settings, mode="ellm", restore="swap", layer_group=L4.shape.layers
    )
    loads = [small_load(seed=seed) for seed in range(12)]
    swap = [simulate(small, settings, load) for load in loads]
    monkeypatch.setattr(settings_module, "create", lambda name, options: WholeRequests())
    policy = [simulate(small, elastic, load) for load in loads]
    assert all(r.retractions > 0 for r in swap) and all(r.uncached_share > 0 for r in policy)
    for figure in (
        lambda r: r.decode_steps,
        lambda r: r.summary.tokens_per_s,
        lambda r: r.summary.ttft.mean,
    ):
        assert sum(map(figure, swap)) == pytest.approx(sum(map(figure, policy)), rel=0.02)


def test_nobody_new_joins_before_who_was_swapped_out_is_back(monkeypatch):
    """Three requests outgrow the memory; a fourth, which would fit, comes while one is out."""
    arrivals, tokens = np.array([0, 0.2, 0.4, 3.5]), np.array([128, 128, 128, 32])
    load = Load.of(Trace(arrivals, tokens, np.array([100, 100, 70, 4])))
    settings = Settings("swap", stride=1, conservativeness=0.02)
    simulation = Simulation(L4.limited(512, None), settings, load)
    returned: list[tuple[float, list[int]]] = []
    fetch = simulation._fetch

    def noted(requests: Sequence[int]) -> None:
        returned.append((simulation.clock.now_s, list(requests)))
        fetch(requests)

    monkeypatch.setattr(simulation, "_fetch", noted)
    simulation.run()
    ((back_s, ids),) = returned
    assert ids == [2] and simulation.record.retractions == 1
    # The first to end makes the room; not SGLang's accounting, which would want room for growth.
    assert 3.5 < back_s == simulation.progress.last_s[0]
    assert simulation.progress.first_s[3] > back_s


def test_whole_requests_come_back_in_steps_that_restore():
    """As in eLLM such a step takes longer; all requests are there from the beginning."""
    load, overhead_s = Load.of(Trace(np.zeros(3), np.full(3, 128), np.full(3, 100))), 0.5
    settings = Settings("swap", stride=1, conservativeness=0.02)
    profile = dataclasses.replace(L4.profile, restore_overhead_s=overhead_s)
    slower = dataclasses.replace(L4, profile=profile)
    ends = []
    for machine in (L4, slower):
        simulation = Simulation(machine.limited(512, None), settings, load)
        simulation.run()
        ends.append(simulation.clock.now_s)
    assert simulation.record.retractions == 1
    assert ends[1] == pytest.approx(ends[0] + overhead_s)


def test_what_a_full_host_has_not_kept_is_computed_again(monkeypatch):
    """A transfer of KV that is nowhere would hide beside the step."""
    load, settings = small_load(), Settings("ellm", "stock", conservativeness=0.02, restore="swap")
    lost: list[float] = []
    step_seconds = RestoringModel.step_seconds

    def noted(self, work):
        if np.size(work.decode_rows) == 1 and np.any(work.swap_tokens):
            lost.append(float(np.max(work.recompute_share * work.restored_tokens)))
        return step_seconds(self, work)

    monkeypatch.setattr(RestoringModel, "step_seconds", noted)
    ends, again = [], []
    for host_tokens in (None, 320):
        lost.clear()
        simulation = Simulation(L4.limited(2000, host_tokens), settings, load)
        simulation.run()
        ends.append(simulation.clock.now_s)
        again.append(sum(lost))
    # A prompt that begins without units beside others is computed again anyway.
    assert again[1] > 2 * again[0] and ends[1] > ends[0]


def test_ample_memory_makes_all_modes_alike():
    load, ample = small_load(), preset("llama3-8b")
    load = dataclasses.replace(load, tpot_slo_s=np.full(len(load), math.inf))
    summaries = [simulate(ample, Settings(mode, stride=1), load).summary for mode in MODES]
    assert all(s == summaries[0] for s in summaries)


def test_a_request_larger_than_the_device_completes_only_in_elastic_mode():
    load = Load.of(Trace(np.zeros(2), np.array([5000, 100]), np.array([20, 20])))
    for settings in (Settings("ellm"), Settings("ellm", restore="recompute", chunk_tokens=512)):
        simulation = served(settings, load)
        assert simulation.progress.generated.tolist() == [20, 20]
        simulation.mode.table.check_integrity()
    refusing = simulate(L4, Settings("recompute"), load)
    assert refusing.refused == 1 and refusing.summary.failed == 1
    assert refusing.summary.output_tokens == 20


def test_steps_at_once_are_the_same_steps():
    """Where nothing is evicted, only the times at which requests are admitted may differ."""
    load = Load.of(Trace(np.zeros(6), np.full(6, 40), np.array([30, 30, 64, 64, 64, 64])))
    one = simulate(L4, Settings(stride=1), load)
    many = simulate(L4, Settings(stride=16), load)
    assert many.decode_steps == one.decode_steps
    assert many.summary.tokens_per_s == pytest.approx(one.summary.tokens_per_s, rel=1e-9)
    assert many.summary.tpot.mean == pytest.approx(one.summary.tpot.mean, rel=1e-9)


def test_late_results_come_one_step_after_their_own():
    """A prompt alone, then decoding, a pause, another prompt: TTFT is a decode step longer, and
    what comes last before a pause is not late."""
    load = Load.of(Trace(np.array([0.0, 50.0]), np.array([64, 64]), np.array([3, 1])))
    prompt = simulate(L4, Settings(stride=1), load)
    late = Simulation(L4, Settings(stride=1, late_results=True), load)
    late.run()
    first_s, last_s = late.progress.first_s, late.progress.last_s
    assert first_s[0] - prompt.summary.ttft.p50 == pytest.approx(prompt.decode_step_s, rel=0.05)
    assert last_s[0] - first_s[0] == pytest.approx(prompt.decode_step_s, rel=0.05)  # not 2 steps
    assert first_s[1] - 50.0 == pytest.approx(prompt.summary.ttft.p50, rel=0.05)


def test_of_two_prompts_in_a_row_the_first_is_not_late():
    load = Load.of(Trace(np.zeros(2), np.array([512, 512]), np.array([2, 2])))
    settings = Settings(stride=1, chunk_tokens=512)
    at_once, late = (
        Simulation(L4, dataclasses.replace(settings, late_results=late), load)
        for late in (False, True)
    )
    for simulation in (at_once, late):
        simulation.run()
    assert late.progress.first_s[0] == at_once.progress.first_s[0]
    assert late.progress.first_s[1] > at_once.progress.first_s[1]


def test_a_wrong_model_changes_decisions_only():
    load = small_load()
    exact = Settings("ellm", tpot_slo_s=0.09, conservativeness=0.1)
    wrong = dataclasses.replace(exact, model_error=0.5)
    assert simulate(L4, wrong, load).running_mean < simulate(L4, exact, load).running_mean


def test_steps_take_as_long_as_the_unevenness_says():
    load = Load.of(Trace(np.zeros(1), np.array([64]), np.array([9])))
    even = simulate(L4, Settings(stride=1), load)
    uneven = simulate(L4, Settings(stride=1, step_noise=(1.0, 3.0)), load)
    assert uneven.decode_steps == even.decode_steps == 8
    assert uneven.decode_step_s == pytest.approx(2.0 * even.decode_step_s, rel=0.01)


def test_with_uneven_steps_the_policys_model_learns():
    """Steps take twice as long as the model it begins with says, and it finds that out."""
    load = Load.of(Trace(np.zeros(2), np.array([64, 64]), np.array([200, 300])))
    twice = Simulation(L4, Settings("ellm", stride=1, step_noise=(2.0,)), load)
    twice.run()
    assert isinstance(twice.mode, Elastic)
    first, *_, last = twice.mode.iteration.controller.steps.reports
    assert first.predicted_s == pytest.approx(first.seconds / 2, rel=0.01)
    assert last.predicted_s == pytest.approx(last.seconds, rel=0.01)


def test_the_policys_model_begins_with_what_its_server_took_the_machine_for():
    load = Load.of(Trace(np.zeros(2), np.array([64, 64]), np.array([200, 300])))
    believed = slower(L4.profile, 0.5)
    settings = Settings("ellm", stride=1, step_noise=(1.0,), calibrated=believed)

    def begin(settings: Settings) -> tuple[float, float]:
        """(predicted, taken) of the first step."""
        run = Simulation(L4, settings, load)
        run.run()
        assert isinstance(run.mode, Elastic)
        first = run.mode.iteration.controller.steps.reports[0]
        return first.predicted_s, first.seconds

    predicted, seconds = begin(settings)
    assert predicted == pytest.approx(seconds / 2, rel=0.01)
    known = RooflineLatencyModel(L4.shape, L4.profile)
    steps = [StepWork(decode_rows=b, decode_tokens=100 * b, prefill_rows=0) for b in range(1, 40)]
    steps += [StepWork(0, 0, prefill_rows=n, prefill_pairs=n * n / 2) for n in range(64, 164)]
    observed_steps = tuple((work, float(known.step_seconds(work))) for work in steps)
    predicted, seconds = begin(dataclasses.replace(settings, observed_steps=observed_steps))
    assert predicted == pytest.approx(seconds, rel=0.1)


def test_times_are_the_latency_models():
    load = Load.of(Trace(np.zeros(1), np.array([64]), np.array([3])))
    roofline, paper = (simulate(L4, Settings(latency_model=m), load) for m in ("roofline", "paper"))
    # One request: two decode steps, each of which reads 15 GB of weights at 255 GB/s.
    assert roofline.decode_step_s == pytest.approx(0.06, rel=0.1)
    assert paper.decode_step_s < 0.1 * roofline.decode_step_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "none"}, "mode 'none'"),
        ({"restore": "pray"}, "restore 'pray'"),
        ({"mode": "swap", "admission": "all"}, "admission 'all': give one of sglang, vllm, paper"),
        ({"admission": "vllm"}, "admission 'vllm': mode ellm .* give sglang, or another mode"),
        ({"stride": 0}, "stride 0"),
        ({"model_error": -1.0}, "above -1"),
        ({"step_noise": (1.0, 0.0)}, "step_noise: every factor"),
        ({"step_noise": (1.0,)}, "stride 8"),
        ({"step_noise": (1.0,), "stride": 1, "latency_model": "paper"}, "paper does not learn"),
        ({"calibrated": L4.profile}, "only a model that meets step_noise learns"),
        ({"chunk_tokens": 8}, "less than one block"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**given)


def test_answers_that_had_to_be_replaced_are_counted(monkeypatch):
    class Broken(Fcfs):
        def batch(self, state: SystemState) -> Batch:
            raise ZeroDivisionError

    monkeypatch.setattr(settings_module, "create", lambda name, options: Broken())
    broken = simulate(L4, Settings("ellm"), small_load(4))
    assert broken.fallbacks.keys() == {"exception"} and broken.fallbacks["exception"] > 0
    assert simulate(L4, Settings("recompute"), small_load(4)).fallbacks == {}


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="no policy 'none'"):
        simulate(L4, Settings(policy="none"), small_load(2))


def test_slos_are_judged_per_request():
    trace = Trace(np.zeros(1), np.array([64]), np.array([3]))
    for slo, met in ((10.0, 1.0), (1e-6, 0.0), (math.inf, 1.0)):
        load = Load.of(trace, tpot_slo_s=slo)
        assert simulate(L4, Settings(), load).summary.slo_attainment == met


@pytest.mark.slow
@pytest.mark.parametrize("slo_s", [0.025, 0.1])
def test_rotation_brings_first_tokens_earlier_where_the_slo_is_loose(slo_s: float) -> None:
    """And more of them. Where it is tight, nothing changes."""
    trace = paper_workload("sharegpt", 40, 0, per_second=4.0).scaled(lengths=0.15)
    load = Load.of(trace, 300, tpot_slo_s=slo_s)
    machine = preset("llama2-13b").limited(1500, None)
    rotating = Settings("ellm", "fcfs", {}, "swap", tpot_slo_s=slo_s, layer_group=5, stride=1)
    plain = simulate(
        machine, dataclasses.replace(rotating, policy_options={"rotate": False}), load
    ).summary
    simulation = Simulation(machine, rotating, load)
    simulation.run()
    summary = sum_up(simulation).summary
    if slo_s == 0.025:
        assert summary == plain
        return
    assert isinstance(simulation.mode, Elastic)
    assert simulation.mode.elastic.totals.fetched_ahead_units > 0
    assert summary.ttft.mean < 0.1 * plain.ttft.mean
    assert summary.tokens_per_s > plain.tokens_per_s
    assert summary.slo_attainment == 1.0
