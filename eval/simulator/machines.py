"""What is simulated: a model on a device. Presets, Hugging Face configurations, custom devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import Range, read_json, shown
from ellm_sgl.latency import HardwareProfile, ModelShape

MEMORY_SHARE = 0.9
"""Share of device memory for weights and KV, as SGLang's --mem-fraction-static."""
COMPUTE_SHARE, BANDWIDTH_SHARE, ATTENTION_SHARE = 0.7, 0.85, 0.5
"""What presets take as sustained of the data sheet's FLOPs and bandwidths: assumptions, since no
such device was measured."""
ALL_REDUCE_S = 2e-5
"""Time of one all-reduce besides moving its bytes; over NVLink, of all of it. Two per layer."""

_SIZES, _TIMES = Range(1, 10**24), Range(0, 60)
_SHARES, _PARTS = Range(0, 100), Range(0, 1)
_COUNTS = Range(1, 10**8, whole=True)
_OTHERS = {
    "kv_lora_rank": "attention over compressed KV (MLA)",
    "n_routed_experts": "experts beside shared ones",
}
"""What a configuration says of layers that are none of those reckoned here, nor served."""


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
    restore_overhead_s: float = 0.0
    """What a step takes longer that restores anything, besides the bytes and the arithmetic,"""
    recompute_overhead_s: float = 0.0
    """and one that recomputes anything."""
    phase_change_s: float = 0.0
    fetch_share: float = 0.0
    packing: float = 0.0
    overlap: float = 1.0
    """The last four as in `HardwareProfile`, whose defaults these are."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the field, where a number is out of range or the name is
        no text."""
        if not isinstance(self.name, str):
            raise ValueError(f"name is {shown(self.name)}; give a text")
        for name in ("memory_bytes", "flops", "bytes_per_s", "link_bytes_per_s"):
            _SIZES.check(name, getattr(self, name))
        for name in (
            "link_latency_s", "step_overhead_s", "row_overhead_s", "restore_overhead_s",
            "recompute_overhead_s", "phase_change_s",
        ):  # fmt: skip
            _TIMES.check(name, getattr(self, name))
        for name in ("fetch_share", "packing"):
            _SHARES.check(name, getattr(self, name))
        _PARTS.check("overlap", self.overlap)

    def profile(self, shape: ModelShape, ranks: int, nvlink: bool = True) -> HardwareProfile:
        """What one of `ranks` such devices sustains.

        Args:
            nvlink: between them; otherwise all-reduces go through the link to the host, as a ring:
                each rank sends 2 (n - 1) / n of a row's hidden state, in 16 bits.
        """
        reduces = 2 * shape.layers if ranks > 1 else 0
        link = BANDWIDTH_SHARE * self.link_bytes_per_s
        sent = 0.0 if nvlink else 2 * (ranks - 1) / ranks * 2 * shape.hidden
        return HardwareProfile(
            name=self.name,
            flops=COMPUTE_SHARE * self.flops,
            device_bytes_per_s=BANDWIDTH_SHARE * self.bytes_per_s,
            link_bytes_per_s=link,
            link_latency_s=self.link_latency_s,
            step_overhead_s=self.step_overhead_s + reduces * ALL_REDUCE_S,
            row_overhead_s=self.row_overhead_s,
            restore_overhead_s=self.restore_overhead_s,
            recompute_overhead_s=self.recompute_overhead_s,
            phase_change_s=self.phase_change_s,
            fetch_share=self.fetch_share,
            packing=self.packing,
            overlap=self.overlap,
            attention_flops=ATTENTION_SHARE * self.flops,
            reduce_row_s=reduces * sent / link,
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


@dataclass(frozen=True)
class Preset:
    """A model of `MODELS` on devices of `DEVICES`."""

    model: str
    device: str
    ranks: int = 1
    """Tensor-parallel."""
    nvlink: bool = True
    """Between the ranks."""


PRESETS = {
    "llama2-13b": Preset("llama2-13b", "a100-80g"),
    "llama2-70b": Preset("llama2-70b", "a100-80g", 4),
    "llama2-70b-pcie": Preset("llama2-70b", "a100-80g", 4, nvlink=False),
    "llama3-8b": Preset("llama3-8b", "l4"),
}
"""Ready machines."""


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

    def host_tokens_in(self, host_bytes: float) -> int:
        """KV tokens that so much host memory holds, of all ranks together."""
        return int(host_bytes // (self.shape.kv_bytes_per_token * self.ranks))

    def limited(self, kv_tokens: int | None, host_tokens: int | None) -> Machine:
        """The same with other memory, where it is given."""
        given: dict[str, Any] = {"kv_tokens": kv_tokens, "host_tokens": host_tokens}
        return dataclasses.replace(self, **{k: v for k, v in given.items() if v is not None})


def preset(name: str) -> Machine:
    """A machine of `PRESETS`.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    found = PRESETS[name]
    return assemble(MODELS[found.model], DEVICES[found.device], found.ranks, name, found.nvlink)


def assemble(
    model: ModelShape, device: Device, ranks: int, name: str, nvlink: bool = True
) -> Machine:
    """A model over `ranks` devices of one kind, with NVLink between them or not.

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
    return Machine(name, shape, device.profile(shape, ranks, nvlink), tokens, ranks=ranks)


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
        ConfigError: it cannot be read, lacks something, has a count that makes no sense, or layers
            that are reckoned otherwise.
    """
    config = _read_json(path)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    for name, what in _OTHERS.items():
        if text.get(name):
            raise ConfigError(f"{path} has {name!r}: {what} can be neither simulated nor served")
    count = partial(_count, path, text)
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    experts = count("num_local_experts", "num_experts", default=1)
    width = ("moe_intermediate_size",) if experts > 1 else ()
    element = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
    return ModelShape(
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", default=heads),
        head_dim=count("head_dim", default=max(hidden // heads, 1)),
        intermediate=count(*width, "intermediate_size"),
        vocabulary=count("vocab_size"),
        experts=experts,
        experts_per_token=count("num_experts_per_tok", default=1),
        weight_bytes=element,
        kv_bytes=element,
    )


def read_unquantised(path: Path) -> ModelShape:
    """As `read_model`, of a model whose weights have the type that it computes in.

    Raises:
        ConfigError: as `read_model`; or they take other bytes than are reckoned.
    """
    found = read_model(path)
    if _read_json(path).get("quantization_config"):
        raise ConfigError(
            f"{path} has 'quantization_config': only models whose weights are not quantised can be "
            "simulated"
        )
    return found


def _count(path: Path, config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these that a configuration has; some write null or 0 for none."""
    for name in names:
        if value := config.get(name):
            if value not in _COUNTS:
                raise ConfigError(f"{path}: {name} is {shown(value)}; give {_COUNTS}")
            return int(value)
    if default is None:
        raise ConfigError(f"{path} has no {names[-1]!r}; it is no decoder's config.json")
    return default


def device_named(name: str) -> Device:
    """One of `DEVICES`, or a file's.

    Raises:
        ConfigError: as `read_device`.
    """
    return DEVICES.get(name) or read_device(Path(name))


def read_device(path: Path) -> Device:
    """A device from a JSON object with the fields of `Device`.

    Raises:
        ConfigError: it cannot be read, has other fields, or numbers that make no sense.
    """
    values = _read_json(path)
    try:
        return Device(**values)
    except TypeError as error:
        names = ", ".join(f.name for f in dataclasses.fields(Device))
        raise ConfigError(f"{path}: {error}; the fields are {names}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values
