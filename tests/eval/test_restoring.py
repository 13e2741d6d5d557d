"""What restoration costs in the simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ellm_sgl.eval.simulator import preset
from ellm_sgl.eval.simulator.restoring import (
    RESTORATIONS,
    RestoringModel,
    fetch_seconds,
    hcache_seconds,
    hcache_size,
)
from ellm_sgl.latency import (
    FetchingLatencyModel,
    HostCopies,
    PaperLatencyModel,
    RooflineLatencyModel,
    StepWork,
)

L4 = preset("llama3-8b")


def model(restore: str, host: int | None = None, paper: bool = False, **how: Any):
    inner = (PaperLatencyModel if paper else RooflineLatencyModel)(L4.shape, L4.profile)
    machine = dataclasses.replace(L4, host_tokens=host)
    return RestoringModel(inner, machine, RESTORATIONS[restore], **how)


def work(span: float, requests: int = 20, tokens: int = 900) -> StepWork:
    """The host has all that it restores."""
    n = span * tokens
    return StepWork(
        requests, float(requests * tokens), requests * n, requests * n * n,
        swap_tokens=requests * n, recompute_share=0.0,
    )  # fmt: skip


def test_the_papers_six_configurations_and_either_way_alone():
    assert RESTORATIONS["both"] == (0, 1 / 4, 1 / 3, 2 / 5, 1 / 2, 2 / 3, 1)


@pytest.mark.parametrize("paper", [False, True])
def test_recomputing_alone_is_the_inner_model(paper):
    inner = (PaperLatencyModel if paper else RooflineLatencyModel)(L4.shape, L4.profile)
    for span in (0.0, 0.1, 0.7):
        seconds = model("recompute", paper=paper).step_seconds(work(span))
        whole = dataclasses.replace(work(span), swap_tokens=0, recompute_share=1.0)
        assert seconds == pytest.approx(inner.step_seconds(whole))


def test_to_restore_anything_takes_its_time_however_it_comes_back():
    profile = dataclasses.replace(L4.profile, restore_overhead_s=2e-3, recompute_overhead_s=1e-3)
    machine = dataclasses.replace(L4, profile=profile)
    inner = RooflineLatencyModel(L4.shape, profile)
    for share, longer in ((0.0, 2e-3), (0.5, 3e-3), (1.0, 3e-3)):
        taken = RestoringModel(inner, machine, (share,)).step_seconds(work(0.5))
        before = RestoringModel(
            RooflineLatencyModel(L4.shape, L4.profile), L4, (share,)
        ).step_seconds(work(0.5))
        assert taken == pytest.approx(before + longer, abs=1e-9)
        idle = RestoringModel(inner, machine, (share,)).step_seconds(work(0.0))
        assert idle == pytest.approx(inner.step_seconds(work(0.0)))


@pytest.mark.parametrize("paper", [False, True])
def test_a_step_that_only_fetches_is_one_of_those_that_decode(paper):
    fetching = work(0.001)  # in less time than the step takes
    decoding = model("swap", paper=paper).step_seconds(work(0.0))
    assert model("swap", paper=paper).step_seconds(fetching) == pytest.approx(decoding)


def test_both_are_never_worse_than_either():
    for span in (0.01, 0.1, 0.3, 0.6, 0.95):
        either = [model(way).step_seconds(work(span)) for way in ("recompute", "swap")]
        assert model("both").step_seconds(work(span)) <= min(either)


@pytest.mark.parametrize("host", [None, 5_000])
def test_a_policy_on_a_server_with_a_host_tier_sees_the_devices_own_costs(host):
    device = model("both", host)
    seen = FetchingLatencyModel(device, HostCopies(0, 0, 1 << 30 if host is None else host))
    for span in (0.0, 0.1, 0.36, 0.9):
        assert seen.step_seconds(work(span)) == device.step_seconds(work(span))


def test_a_transfer_beside_the_step_is_free_until_it_is_longer():
    free = model("swap").step_seconds(work(0.0))
    assert model("swap").step_seconds(work(0.1)) == pytest.approx(free)
    link_s = 20 * 0.9 * 900 * L4.shape.kv_bytes_per_token / L4.profile.link_bytes_per_s
    long = model("swap").step_seconds(work(0.9))
    assert long == pytest.approx(link_s, rel=1e-3) and long > free
    assert model("swap", overlapped=False).step_seconds(work(0.9)) == pytest.approx(free + long)


def test_a_full_host_leaves_the_rest_to_recomputation():
    bounded = model("swap", host=0).step_seconds(work(0.3))
    assert bounded == pytest.approx(model("recompute").step_seconds(work(0.3)))


@pytest.mark.parametrize("restore", ["swap", "both"])
def test_what_the_host_has_not_is_recomputed(restore):
    """However much it could hold: told as the share of what is restored."""
    whole = work(0.3)
    for lost in (0.25, 1.0):
        told = dataclasses.replace(whole, swap_tokens=whole.restored_tokens, recompute_share=lost)
        least = dataclasses.replace(
            whole,
            restored_tokens=lost * whole.restored_tokens,
            restored_squares=lost * whole.restored_squares,
        )
        seconds = model(restore).step_seconds(told)
        assert seconds >= model("recompute").step_seconds(least)
        assert seconds <= model("recompute").step_seconds(whole) * (1 + 1e-9)
        assert model(restore).restored(told).recompute_share >= lost
    many = dataclasses.replace(
        StepWork(20, 18_000.0, 20 * np.array([0.0, 90, 90]), 20 * np.array([0.0, 8100, 8100])),
        swap_tokens=20 * np.array([0.0, 90, 90]), recompute_share=np.array([0.0, 0.0, 1.0]),
    )  # fmt: skip
    none, all_there, all_lost = model(restore).step_seconds(many)
    assert none <= all_there < all_lost


def test_a_separate_pass_takes_its_share_of_the_layers():
    """Few rows: reading weights is what it takes, of the layers that recompute."""
    inner = RooflineLatencyModel(L4.shape, L4.profile)
    few, rest = work(0.01), work(0.0)
    decode = float(inner.step_seconds(rest))
    whole = float(inner.step_seconds(StepWork(0, 0, few.restored_tokens, few.restored_squares)))
    for share in (0.25, 0.5, 1.0):
        apart = RestoringModel(inner, L4, (share,), fused=False)
        link_s = (1 - share) * few.restored_tokens * L4.shape.kv_bytes_per_token
        link_s = link_s / L4.profile.link_bytes_per_s + (share < 1) * L4.profile.link_latency_s
        beside_s = L4.profile.fetch_share * link_s
        assert link_s < decode
        seconds = float(apart.step_seconds(few))
        assert seconds == pytest.approx(decode + share * whole + beside_s, rel=1e-3)


def test_a_separate_pass_of_the_few_tokens_that_are_lost_goes_through_all_layers():
    inner = RooflineLatencyModel(L4.shape, L4.profile)
    lost = dataclasses.replace(work(0.1), recompute_share=0.003)
    weights_s = float(inner.step_seconds(StepWork(0, 0, restored_tokens=1, restored_squares=1)))
    decode_s = float(inner.step_seconds(work(0.0)))
    for shares in RESTORATIONS["swap"], RESTORATIONS["both"]:
        apart = RestoringModel(inner, L4, shares, fused=False)
        assert float(apart.step_seconds(lost)) >= decode_s + weights_s
        assert (
            float(apart.step_seconds(dataclasses.replace(lost, recompute_share=0.0)))
            < decode_s + weights_s
        )


def test_separate_passes_read_the_weights_twice():
    apart = model("recompute", fused=False)
    assert apart.step_seconds(work(0.1)) > model("recompute").step_seconds(work(0.1))
    assert apart.step_seconds(work(0.0)) == model("recompute").step_seconds(work(0.0))


@pytest.mark.parametrize("restore", sorted(RESTORATIONS))
def test_many_candidates_at_once_are_each_alone_and_never_fall(restore):
    spans = np.linspace(0, 0.95, 20)
    n = spans * 900
    many = StepWork(20, 18_000.0, 20 * n, 20 * n * n, swap_tokens=20 * n, recompute_share=0.0 * n)
    together = model(restore, host=9000).step_seconds(many)
    alone = [float(model(restore, host=9000).step_seconds(work(s))) for s in spans]
    np.testing.assert_allclose(together, alone)
    assert (np.diff(together) >= -1e-12).all()


def test_hcache_restores_faster_than_fetching_all_kv():
    machine = preset("llama2-13b")  # hidden states are half as large as KV there
    whole = fetch_seconds(machine, 2000)
    half = hcache_seconds(machine, 2000)
    assert 0.5 * whole <= half < 0.75 * whole
    assert 0.5 <= hcache_size(machine) < 0.75
    assert hcache_size(L4) == 1.0  # grouped heads: KV is smaller than hidden states
