"""Model shapes from configs, and the work of calibration's made-up steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.tiny_models import TINY_MODELS, write
from ellm_sgl.latency import HardwareProfile, ModelShape, RooflineLatencyModel, StepWork
from ellm_sgl.latency.fit import fit_profile
from ellm_sgl.memory import KVPool, PoolShape
from ellm_sgl.sglang import calibration
from ellm_sgl.sglang.calibration import shape_of, with_scheduling
from ellm_sgl.sglang.mixes import FEW_ROWS, MEASURED_BYTES, MIXES, Mix
from ellm_sgl.sglang.synthetic_steps import SyntheticSteps


def matrix_weights(folder: Path) -> int:
    """Weights of all matrices in a model's files, embeddings and MoE routers aside."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                size = tensors.get_slice(name).get_shape()
                router = name.endswith((".gate.weight", "router.weight"))
                if len(size) > 1 and "embed_tokens" not in name and not router:
                    count = 1
                    for side in size:
                        count *= side
                    total += count
    return total


def layer_weights(shape: ModelShape) -> int:
    return shape.layers * (shape.attention_weights + shape.experts * shape.expert_weights)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mixtral", "qwen3-moe"])
def test_shape_accounts_for_every_weight(name: str, tmp_path: Path) -> None:
    shape = shape_of(str(write(name, tmp_path)), "bfloat16")
    tied = TINY_MODELS[name].tied
    head = 0 if tied else shape.hidden * shape.vocabulary
    assert matrix_weights(tmp_path) == layer_weights(shape) + head
    assert shape.weight_bytes == shape.kv_bytes == 2


def test_shape_of_the_demo_model() -> None:
    assert shape_of(str(DEMO_MODEL), "float32") == ModelShape(
        layers=8,
        hidden=192,
        heads=6,
        kv_heads=2,
        head_dim=32,
        intermediate=512,
        vocabulary=264,
        weight_bytes=4,
        kv_bytes=4,
    )


@pytest.mark.parametrize("mix", [*MIXES, *FEW_ROWS, Mix(3, 50, new=7), Mix(2, 40, uncached=16)])
def test_work_counts_rows_and_pairs(mix: Mix) -> None:
    spans = range(mix.uncached)
    new = range(mix.tokens - mix.new, mix.tokens)
    work = mix.work
    assert work.restored_tokens == mix.requests * len(spans)
    assert work.restored_pairs == mix.requests * sum(p + 1 for p in spans)
    if mix.new == 1:
        assert (work.decode_rows, work.decode_tokens) == (
            mix.requests,
            mix.requests * sum(p + 1 for p in new),
        )
        assert work.prefill_rows == 0
    else:
        assert work.prefill_rows == mix.requests * len(new)
        assert work.prefill_pairs == mix.requests * sum(p + 1 for p in new)
        assert work.decode_rows == 0


LLAMA_13B = ModelShape(40, 5120, 40, 40, 128, 13824, 32000)
H100 = HardwareProfile(
    "cuda", flops=1.67e14, device_bytes_per_s=1.56e12, link_bytes_per_s=5.27e10,
    link_latency_s=2.7e-5, step_overhead_s=8.9e-4, row_overhead_s=5.5e-6,
    attention_flops=4.5e13, kv_bytes_per_s=4.5e12, overlap=0.71,
)  # fmt: skip
"""As calibrated there on 26 November 2026."""


def test_what_recomputing_takes_on_a_device_is_measured_and_learnt() -> None:
    """Decode steps of 4 requests on an H100: 11.4 ms from a graph, 17.5 layer by layer."""
    truth = dataclasses.replace(H100, recompute_overhead_s=6.1e-3)
    steps = RooflineLatencyModel(LLAMA_13B, truth)
    measured = [(mix.work, float(steps.step_seconds(mix.work))) for mix in MIXES]
    guess = dataclasses.replace(H100, restore_overhead_s=1e-3)
    profile = with_scheduling(fit_profile(LLAMA_13B, guess, measured))
    assert profile.recompute_overhead_s == pytest.approx(6.1e-3, rel=0.1)
    whole = StepWork(4, 2400)
    restoring = StepWork(4, 2500, 16, 16 * 16.0)
    errors = []
    for of_profile in (H100, profile):
        model = RooflineLatencyModel(LLAMA_13B, of_profile)
        for _ in range(100):
            model.observe(whole, 11.4e-3)
            model.observe(restoring, 17.5e-3)
        found = float(model.step_seconds(whole)), float(model.step_seconds(restoring))
        errors.append(max(abs(found[0] / 11.4e-3 - 1), abs(found[1] / 17.5e-3 - 1)))
    unknown, known = errors
    assert known < 0.1 < unknown


def test_a_device_runs_a_step_of_every_kind_whatever_the_guess_says() -> None:
    """A guess made while another server started had a hundredth of the arithmetic: no step that
    recomputes was run, and the first of a request took 3.8 s, for the compiler."""
    disturbed = dataclasses.replace(H100, flops=9.6e11, attention_flops=4.8e11)
    steps: Any = SimpleNamespace(that_fit=list)
    found = calibration._affordable(LLAMA_13B, disturbed, steps)
    assert set(found) == set(MIXES)
    # A prompt's chunk behind another has kernels of its own, too.
    assert {mix.kind for mix in found} >= {
        (False, False, False), (False, True, False), (True, False, False), (True, False, True),
    }  # fmt: skip
    on_host = dataclasses.replace(disturbed, name="cpu")
    kept = calibration._affordable(LLAMA_13B, on_host, steps)
    assert 0 < len(kept) < len(found)


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1", "601"])
def test_a_time_to_measure_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.VARIABLE, "1.5")
    assert calibration._seconds() == 1.5
    monkeypatch.setenv(calibration.VARIABLE, text)
    with pytest.raises(ConfigError, match=r"ELLM_SGL_CALIBRATION_S=.*: give a number from 0 up to"):
        calibration._seconds()


def test_memory_of_steps_is_measured_with_sglangs_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    aside: list[bool] = [False]

    class Compiled:
        @contextmanager
        def aside(self) -> Iterator[None]:
            aside[0] = True
            yield
            aside[0] = False

    def peak(step: Callable[[], float]) -> int:
        assert aside[0]
        return int(step())

    monkeypatch.setattr(calibration, "peak_bytes", peak)
    steps: Any = SimpleNamespace(that_fit=list, run=lambda mix: 100 * mix.rows)
    few = [(m.rows, m.requests, 100 * m.rows) for m in FEW_ROWS]
    ours: Any = SimpleNamespace(compiled=Compiled())
    assert calibration.measured_bytes(ours, steps, ()) == few
    more = calibration.measured_bytes(ours, steps, MEASURED_BYTES)
    assert len(more) == len(few) + len(MEASURED_BYTES) and more[: len(few)] == few
    assert aside == [False]


@pytest.mark.parametrize("block", [1, 16, 24, 64, 256, 1024])
def test_made_up_steps_restore_what_their_work_says(block: int) -> None:
    """In whole blocks, of any size: what is claimed to be restored is recomputed."""
    shape = PoolShape(num_layers=2, layer_group=1, block_tokens=block)
    ours: Any = SimpleNamespace(
        executor=None,
        pool=KVPool(shape, 1, 1, 4, torch.float32, "cpu"),
        memory=None,
        table=SimpleNamespace(committed_units=1 << 20),
    )
    runner: Any = SimpleNamespace(model_config=SimpleNamespace(context_len=8192))
    steps = SyntheticSteps(runner, ours)
    fitting = steps.that_fit(MIXES)
    restoring = [mix for mix in fitting if mix.uncached]
    assert bool(restoring) == (block < 1024) and len(set(fitting)) == len(fitting)
    for mix in fitting:
        plan = steps._plan(*steps._requests(mix))
        assert plan.new_rows + plan.recomputed_rows == mix.rows, mix
        assert mix.work.restored_tokens == plan.recomputed_rows


def test_the_link_is_copied_over_as_kv_is_fetched() -> None:
    """Unit by unit, by one thread, and all of it."""
    host, buffer = torch.arange(16.0 * 4096), torch.zeros(16 * 4096)
    calibration._transfer(host, buffer)()
    units = buffer.reshape(16, -1)
    assert not torch.equal(buffer, host), "wherever they are"
    assert torch.equal(units[units[:, 0].argsort()], host.reshape(16, -1))
