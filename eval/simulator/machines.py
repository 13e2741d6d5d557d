"""What is simulated: a model on a device. Presets, Hugging Face configurations, custom devices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ellm_sgl.config import ConfigError
from ellm_sgl.latency import HardwareProfile, ModelShape

MEMORY_SHARE = 0.9
"""Share of device memory for weights and KV, as SGLang's --mem-fraction-static."""
COMPUTE_SHARE, BANDWIDTH_SHARE, ATTENTION_SHARE = 0.7, 0.85, 0.5
"""What presets take as sustained of the data sheet's FLOPs and bandwidths (DESIGN §5)."""
ALL_REDUCE_S = 2e-5
"""Time of one all-reduce of a decode step's rows over NVLink; two per layer."""


@dataclass(frozen=True)
class Device:
    """A device by its data sheet."""

    name: str
    memory_bytes: float
    flops: float
    """Dense 16-bit floating-point operations per second."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """Bandwidth of its link to host memory, one way."""
    link_latency_s: float = 1e-5
    step_overhead_s: float = 1e-3
    """Time of a step that neither memory nor arithmetic explain: scheduling, launches."""
    row_overhead_s: float = 5e-6

    def profile(self, shape: ModelShape, ranks: int) -> HardwareProfile:
        """What one of `ranks` such devices sustains."""
        reduces = 2 * shape.layers * ALL_REDUCE_S if ranks > 1 else 0.0
        return HardwareProfile(
            name=self.name,
            flops=COMPUTE_SHARE * self.flops,
            device_bytes_per_s=BANDWIDTH_SHARE * self.bytes_per_s,
            link_bytes_per_s=BANDWIDTH_SHARE * self.link_bytes_per_s,
            link_latency_s=self.link_latency_s,
            step_overhead_s=self.step_overhead_s + reduces,
            row_overhead_s=self.row_overhead_s,
            attention_flops=ATTENTION_SHARE * self.flops,
        )


DEVICES = {
    device.name: device
    for device in (
        Device("a100-80g", 80e9, 312e12, 2.039e12, 25e9),
        Device("h100-80g", 80e9, 989e12, 3.35e12, 50e9),
        Device("l4", 24e9, 121e12, 300e9, 25e9),
        Device("rtx-4090", 24e9, 165e12, 1.008e12, 25e9),
        Device("rtx-5090", 32e9, 210e12, 1.792e12, 50e9),
    )
}
"""Data-sheet figures; links are PCIe 4 (25 GB/s) or 5 (50 GB/s) with 16 lanes."""

MODELS = {
    "llama2-13b": ModelShape(40, 5120, 40, 40, 128, 13824, 32000),
    "llama2-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 32000),
    "llama3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
}
"""Whole models, as one rank alone would hold them."""

PRESETS = {
    "llama2-13b": ("llama2-13b", "a100-80g", 1),
    "llama2-70b": ("llama2-70b", "a100-80g", 4),
    "llama3-8b": ("llama3-8b", "l4", 1),
}
"""(model, device, tensor-parallel ranks)"""


@dataclass(frozen=True)
class Machine:
    """A model on a device, ready to be simulated. Token counts are of the whole model's KV."""

    name: str
    shape: ModelShape
    """Of one rank."""
    profile: HardwareProfile
    """Of one rank."""
    kv_tokens: int
    """KV tokens that device memory holds."""
    host_tokens: int | None = None
    """KV tokens that host memory holds; None: as many as are needed."""
    ranks: int = 1

    def limited(self, kv_tokens: int | None, host_tokens: int | None) -> Machine:
        """The same with other memory, where it is given."""
        changes: dict[str, Any] = {}
        if kv_tokens is not None:
            changes["kv_tokens"] = kv_tokens
        if host_tokens is not None:
            changes["host_tokens"] = host_tokens
        return dataclasses.replace(self, **changes)


def preset(name: str) -> Machine:
    """A machine of `PRESETS`.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    model, device_name, ranks = PRESETS[name]
    return assemble(MODELS[model], DEVICES[device_name], ranks, name)


def assemble(model: ModelShape, device: Device, ranks: int, name: str) -> Machine:
    """A model over `ranks` devices of one kind.

    Raises:
        ConfigError: its weights leave no room for KV.
    """
    shape = one_rank(model, ranks)
    room = MEMORY_SHARE * device.memory_bytes - weight_bytes(shape)
    if room < shape.kv_bytes_per_token:
        raise ConfigError(
            f"{name}: weights of {weight_bytes(shape) / 1e9:.1f} GB per rank leave no room for KV "
            f"in {MEMORY_SHARE:.0%} of {device.memory_bytes / 1e9:.0f} GB; use more ranks"
        )
    tokens = int(room // shape.kv_bytes_per_token)
    return Machine(name, shape, device.profile(shape, ranks), tokens, ranks=ranks)


def weight_bytes(shape: ModelShape) -> float:
    """Bytes of the weights, embeddings and output head included."""
    layer = shape.attention_weights + shape.experts * shape.expert_weights
    return shape.weight_bytes * (shape.layers * layer + 2 * shape.vocabulary * shape.hidden)


def one_rank(model: ModelShape, ranks: int) -> ModelShape:
    """What one of so many tensor-parallel ranks holds.

    Raises:
        ConfigError: the heads cannot be divided so.
    """
    if ranks < 1 or model.heads % ranks:
        raise ConfigError(f"{model.heads} heads cannot be divided among {ranks} ranks")
    return dataclasses.replace(
        model,
        heads=model.heads // ranks,
        kv_heads=max(model.kv_heads // ranks, 1),
        intermediate=model.intermediate // ranks,
        vocabulary=-(-model.vocabulary // ranks),
    )


def read_model(path: Path) -> ModelShape:
    """The model that a Hugging Face `config.json` describes.

    Raises:
        ConfigError: it cannot be read, or lacks something.
    """
    config = _read_json(path)
    config = config.get("text_config", config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        experts = config.get("num_local_experts") or config.get("num_experts") or 1
        width = config.get("moe_intermediate_size") if experts > 1 else None
        element = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(width or config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            experts=int(experts),
            experts_per_token=int(config.get("num_experts_per_tok") or 1),
            weight_bytes=element,
            kv_bytes=element,
        )
    except KeyError as error:
        raise ConfigError(f"{path} has no {error}; it is no decoder's config.json") from None


def read_device(path: Path) -> Device:
    """A device from a JSON object with the fields of `Device`.

    Raises:
        ConfigError: it cannot be read, or has other fields.
    """
    values = _read_json(path)
    try:
        return Device(**values)
    except TypeError as error:
        names = ", ".join(f.name for f in dataclasses.fields(Device))
        raise ConfigError(f"{path}: {error}; the fields are {names}") from None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values
