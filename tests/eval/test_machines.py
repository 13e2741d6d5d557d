"""Presets, Hugging Face configurations and custom devices."""

from __future__ import annotations

import json

import pytest

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.simulator.machines import (
    DEVICES,
    MODELS,
    PRESETS,
    assemble,
    preset,
    read_device,
    read_model,
    read_unquantised,
    weight_bytes,
)
from ellm_sgl.latency import RooflineLatencyModel, StepWork

PARAMETERS = {"llama2-13b": 13.0e9, "llama2-70b": 69.0e9, "llama3-8b": 8.03e9}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_have_their_number_of_parameters(name):
    assert weight_bytes(MODELS[name]) / 2 == pytest.approx(PARAMETERS[name], rel=0.01)


def test_presets_leave_the_room_that_the_design_counts_with():
    """What is left beside weights, at 0.9 of the memory: 45 GB for KV of 13B on an A100, 5 GB for
    8B on an L4."""
    for name, gigabytes in (("llama2-13b", 45), ("llama3-8b", 5)):
        machine = preset(name)
        kv_bytes = machine.kv_tokens * machine.shape.kv_bytes_per_token
        assert kv_bytes == pytest.approx(gigabytes * 1e9, rel=0.15)
    assert preset("llama2-70b").shape.kv_heads == 2
    assert set(PRESETS) == {"llama2-13b", "llama2-70b", "llama2-70b-pcie", "llama3-8b"}
    with pytest.raises(ConfigError, match="no preset 'gpt'"):
        preset("gpt")


def test_without_nvlink_every_row_crosses_the_link_at_every_all_reduce():
    """A ring of 4 sends 1.5 times 8,192 elements of 2 bytes, twice in each of 80 layers."""
    fast, slow = preset("llama2-70b"), preset("llama2-70b-pcie")
    assert (fast.shape, fast.kv_tokens) == (slow.shape, slow.kv_tokens)
    per_row = 160 * 1.5 * 8192 * 2 / slow.profile.link_bytes_per_s

    def slower_by(work: StepWork) -> float:
        seconds = [
            RooflineLatencyModel(m.shape, m.profile).step_seconds(work) for m in (slow, fast)
        ]
        return float(seconds[0] - seconds[1])

    assert slower_by(StepWork(100, 1e5)) == pytest.approx(100 * per_row)
    assert slower_by(StepWork(100, 1e5, 50.0, 100.0)) == pytest.approx(150 * per_row)
    assert slower_by(StepWork(0, 0, prefill_rows=512, prefill_pairs=1e5)) == pytest.approx(
        512 * per_row
    )


def test_host_memory_is_counted_in_tokens_of_the_whole_model():
    assert preset("llama2-13b").host_tokens_in(40e9) == 40e9 // (40 * 40 * 128 * 2 * 2)
    assert preset("llama2-70b").host_tokens_in(160e9) == 160e9 // (80 * 8 * 128 * 2 * 2)


def test_a_hugging_face_configuration_is_read(tmp_path):
    shape = read_model(DEMO_MODEL / "config.json")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert shape.layers == config["num_hidden_layers"]
    assert shape.kv_heads == config["num_key_value_heads"]
    assert shape.weight_bytes == 4
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(ConfigError, match="no 'num_attention_heads'"):
        read_model(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path / "none.json")


def test_a_device_is_read(tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps({"name": "mine", "memory_bytes": 48e9, "flops": 1e14,
                                "bytes_per_s": 1e12, "link_bytes_per_s": 2e10}))  # fmt: skip
    machine = assemble(MODELS["llama3-8b"], read_device(path), 1, "mine")
    assert machine.profile.device_bytes_per_s == pytest.approx(0.85e12)
    own = {"phase_change_s": 2e-3, "fetch_share": 1.6, "packing": 0.5, "overlap": 0.0}
    path.write_text(json.dumps(DEVICE | own))
    profile = assemble(MODELS["llama3-8b"], read_device(path), 1, "mine").profile
    assert {name: getattr(profile, name) for name in own} == own
    path.write_text('{"name": "mine", "colour": "red"}')
    with pytest.raises(ConfigError, match="colour"):
        read_device(path)


DEVICE = {"name": "mine", "memory_bytes": 48e9, "flops": 1e14, "bytes_per_s": 1e12,
          "link_bytes_per_s": 2e10}  # fmt: skip


@pytest.mark.parametrize(
    "field",
    [
        *list(DEVICE)[1:],
        "link_latency_s",
        "step_overhead_s",
        "phase_change_s",
        "fetch_share",
        "packing",
        "overlap",
    ],
)
@pytest.mark.parametrize("value", [-1, 1e300, True, "8", None, [1], {}], ids=str)
def test_a_devices_numbers_are_in_range(tmp_path, field, value):
    path = tmp_path / "device.json"
    path.write_text(json.dumps(DEVICE | {field: value}))
    with pytest.raises(ConfigError, match=f"{path}: {field} must be a number from .*, got "):
        read_device(path)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "1" * 5000])
def test_numbers_that_are_not_finite_are_refused_as_a_file_is_read(tmp_path, text):
    path = tmp_path / "numbers.json"
    for read, field in ((read_device, "flops"), (read_model, "vocab_size")):
        path.write_text(f'{{"{field}": {text}}}')
        with pytest.raises(ConfigError, match=f"{path}: cannot be read: "):
            read(path)


CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "head_dim",
                                   "vocab_size", "num_experts"])  # fmt: skip
@pytest.mark.parametrize("value", [-1, 2.5, "8", [1], {"a": 1}, 10**30, True], ids=str)
def test_a_models_counts_are_whole_numbers(tmp_path, field, value):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {field: value}))
    with pytest.raises(ConfigError, match=f"{path}: {field} is .*; give a whole number from 1 up"):
        read_model(path)


def test_what_is_null_in_a_configuration_is_as_good_as_absent(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"head_dim": None, "num_experts": 0, "text_config": None}))
    shape = read_model(path)
    assert (shape.head_dim, shape.experts) == (CONFIG["hidden_size"] // shape.heads, 1)


@pytest.mark.parametrize("name", ["kv_lora_rank", "n_routed_experts"])
def test_layers_that_are_reckoned_otherwise_are_refused(tmp_path, name):
    path = tmp_path / "config.json"
    for config in (CONFIG | {name: 64}, {"text_config": CONFIG | {name: 64}}):
        path.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=rf"^{path} has '{name}': .* neither simulated nor"):
            read_model(path)
    path.write_text(json.dumps(CONFIG | {name: None}))
    assert read_model(path) == read_model(DEMO_MODEL / "config.json")


def test_quantised_weights_are_not_taken_for_others(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    assert read_model(path).layers == CONFIG["num_hidden_layers"]
    with pytest.raises(ConfigError, match=rf"^{path} has 'quantization_config': only models"):
        read_unquantised(path)
    assert read_unquantised(DEMO_MODEL / "config.json") == read_model(DEMO_MODEL / "config.json")


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="leave no room"):
        assemble(MODELS["llama2-70b"], DEVICES["l4"], 1, "70b on l4")
    with pytest.raises(ConfigError, match="cannot be divided"):
        assemble(MODELS["llama2-70b"], DEVICES["l4"], 7, "70b on 7")
