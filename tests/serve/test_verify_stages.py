"""The settings that `ellm-sgl verify` goes through."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from ellm_sgl.config import ELLM, HCACHE, MODES, RECOMPUTE, EllmConfig
from ellm_sgl.latency import ModelShape
from ellm_sgl.serve.cli_verify import DTYPES
from ellm_sgl.serve.verify.comparing import NOT_DONE
from ellm_sgl.serve.verify.figures import Comparison
from ellm_sgl.serve.verify.loads import CHATS as CHATS_AT_ONCE
from ellm_sgl.serve.verify.loads import Aborts, Chats
from ellm_sgl.serve.verify.setting import ABORTS, CHATS, PROMPTS, Setting, Sizes
from ellm_sgl.serve.verify.stages import TWO_RANKS, TWO_RANKS_RESIZED, left_out, stages
from ellm_sgl.sglang import cuda

MODEL = ModelShape(
    vocabulary=512, layers=5, heads=4, kv_heads=2, head_dim=64, hidden=128, intermediate=256
)
ODD = dataclasses.replace(MODEL, kv_heads=1)


def sizes(longest: int = 1500, model: ModelShape = MODEL, block_tokens: int = 16) -> Sizes:
    rng = random.Random(0)
    needed = {PROMPTS: 4000}
    needed[CHATS] = Chats.up_to(longest + 16, model.vocabulary, rng).most_tokens
    needed[ABORTS] = Aborts.up_to(longest + 16, model.vocabulary, rng).most_tokens
    return Sizes(model, longest, 16, needed, 4, block_tokens)


def settings(dtype: str, mode: str = ELLM, quick: bool = False) -> list[Setting]:
    return [s for stage in stages(dtype, mode, quick, sizes()) for s in stage.settings]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quick", [False, True])
def test_each_setting_has_a_name_of_its_own_and_something_to_show(
    mode: str, dtype: str, quick: bool
) -> None:
    found = settings(dtype, mode, quick)
    assert len({s.name for s in found}) == len(found) > 0
    counts = {field.name for field in dataclasses.fields(Comparison)}
    assert counts > NOT_DONE.keys()
    for setting in found:
        assert bool(setting.needs) == (setting.name != "r = 0.0")
        assert NOT_DONE.keys() >= set(setting.needs)


def test_everything_new_is_tried_in_fp32_and_chats_also_in_16_bits_and_quickly() -> None:
    names = [
        [s.name for s in settings(dtype, ELLM, quick)]
        for quick in (False, True)
        for dtype in ("float32", "bfloat16")
    ]
    new = {"chats, paused", "chats, fcfs", "aborts, paused", "chats, mixed chunk",
           "chats, mixed chunk, full", TWO_RANKS, "chats, resized",
           TWO_RANKS_RESIZED}  # fmt: skip
    assert new <= set(names[0])
    assert "chats, paused" in names[1] and "aborts, paused" in names[1]
    assert "chats, paused" in names[2]
    assert names[3] == ["mixed 0:1", "mixed 1:1", "mixed 1:0", "mixed, forced eviction"]


@pytest.mark.parametrize("longest", [48, 100, 500, 1500, 8000])
@pytest.mark.parametrize("block_tokens", [1, 16, 32])
def test_a_crowded_device_holds_a_part_of_the_load_and_a_block_of_each_request(
    longest: int, block_tokens: int
) -> None:
    found = sizes(longest, block_tokens=block_tokens)
    assert found.tight // block_tokens > CHATS_AT_ONCE
    assert found.crowded(CHATS) > found.tight
    if longest >= 500 and block_tokens <= 16:
        for load in (CHATS, ABORTS):
            assert found.crowded(load) < 0.4 * found.load_tokens[load]


def test_two_ranks_that_cannot_share_the_model_are_told_of() -> None:
    told = list(left_out(ELLM, False, ("float32",), ODD))
    assert told == [f"{TWO_RANKS}: 4 heads and 1 KV heads do not divide by 2"]
    names = [s.name for stage in stages("float32", ELLM, False, sizes(model=ODD))
             for s in stage.settings]  # fmt: skip
    assert TWO_RANKS not in names
    for mode, quick, dtypes in (
        (ELLM, True, ("float32",)), (ELLM, False, ("bfloat16",)), (HCACHE, False, ("float32",)),
    ):  # fmt: skip
        assert list(left_out(mode, quick, dtypes, ODD)) == []


def test_every_setting_can_be_resized_and_must_be_then() -> None:
    for stage in stages("float32", ELLM, False, sizes()):
        for before, after in zip(stage.settings, stage.with_resizes(9).settings, strict=True):
            assert (after.resizes, after.swing) == (9, None)
            assert after.needs == (*before.needs, "resized")


def test_a_baseline_must_preempt() -> None:
    assert all("retractions" in s.needs for s in settings("float32", RECOMPUTE))
    assert all("pauses" in s.needs for s in settings("float32", HCACHE))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device_nothing_is_asked_that_it_refuses(
    dtype: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for stage in stages(dtype, ELLM, quick, sizes()):
        arguments = dict(itertools.pairwise(stage.arguments))
        assert not stage.store and arguments.get("--ellm-fusion", "on") == "on"
        config = EllmConfig(host_keeps=arguments.get("--ellm-host-keeps", "kv"))
        assert not config.keeps_hidden
    assert any("store on disk" in line for line in left_out(ELLM, quick, (dtype,), MODEL))
