"""What keeps KV, or hidden states, beside the device pool, and what brings it back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ellm_sgl.config import DEVICE, ConfigError, EllmConfig
from ellm_sgl.forward import AnyStreamer, DeviceStreamer, HiddenStates, NativeStreamer, Streamer
from ellm_sgl.kernels.choose import choose_copy
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kv import HiddenPool, KVPool, PoolShape
from ellm_sgl.latency import hidden_layers
from ellm_sgl.sglang.calibration import measure_device, model_shape

logger = logging.getLogger(__name__)

SLOTS = 2
"""Layer groups whose fetched units a step holds at once: one computes, the next arrives."""


def make_hidden_pool(
    settings: EllmConfig, shape: PoolShape, configurator: Any
) -> HiddenPool | None:
    """Room for the hidden states of as many tokens as the host tier is to keep, or None.

    Raises:
        ConfigError: on CUDA devices, so far.
    """
    if not (groups := _hidden_groups(settings, shape, configurator)):
        return None
    model = configurator.model_config
    slots = settings.host_kv_tokens // shape.block_tokens
    on_device = settings.hidden_on == DEVICE
    file = None
    if settings.host_path is not None and not on_device:
        path = Path(settings.host_path)
        file = path.with_name(path.name + ".hidden")
    device = configurator.device if on_device else "cpu"
    pool = HiddenPool(shape, groups, slots, model.hidden_size, model.dtype, device, file)
    logger.info(
        "eLLM hidden states: %d of %d layer groups, %.1f MB on the %s",
        groups, shape.num_groups, pool.nbytes / 1e6, settings.hidden_on,
    )  # fmt: skip
    return pool


def units_beside(hidden: HiddenPool | None, settings: EllmConfig, units: int, size: int) -> int:
    """Units of KV that the device pool has, beside the hidden states that are kept on the device.

    Args:
        units: that there would be room for without them.
        size: of a unit, in bytes.

    Raises:
        ConfigError: they leave no room for a block.
    """
    if hidden is None or settings.hidden_on != DEVICE:
        return units
    left = units - -(-hidden.nbytes // size)
    groups, block = hidden.shape.num_groups, hidden.shape.block_tokens
    if left < groups:
        raise ConfigError(
            f"--ellm-hidden-on {DEVICE}: the hidden states of {settings.host_kv_tokens} tokens "
            f"(--ellm-host-kv-tokens) take as much memory as {(units - left) * block // groups} "
            f"tokens of KV, and the device pool holds {units * block // groups}; give fewer, or "
            "more --ellm-device-kv-tokens"
        )
    return left


def make_streamer(
    settings: EllmConfig, host_units: int, pool: KVPool, hidden: HiddenStates | None
) -> AnyStreamer:
    """The host's units of KV, and what exchanges them with the device pool.

    Args:
        host_units: that hold KV.
        pool: the device's.

    Raises:
        ConfigError: a setting that CUDA devices lack so far.
    """
    shape, device = pool.shape, pool.buffer.device
    if shape.num_groups <= SLOTS:
        logger.warning(
            "--ellm-layer-group %d makes %d layer groups: fetching from the host gains memory "
            "only with more than %d; give a smaller number",
            shape.layer_group, shape.num_groups, SLOTS,
        )  # fmt: skip
    heads, head_dim = pool.buffer.shape[-2:]
    path = None if settings.host_path is None else Path(settings.host_path)
    on_cpu = device.type == "cpu"
    host = KVPool(shape, host_units, heads, head_dim, pool.buffer.dtype, "cpu", path, not on_cpu)
    if not on_cpu:
        if not settings.fusion:
            raise ConfigError(
                "--ellm-fusion off: with a host tier on CPU hosts only so far; leave out "
                "--ellm-host-kv-tokens"
            )
        return DeviceStreamer(host.buffer, pool.buffer, SLOTS, settings.overlap)
    if hidden is None and not load().problem:
        return NativeStreamer(host.buffer, pool.buffer, SLOTS, settings.overlap)
    copy = choose_copy(device, host.buffer.device)
    project = None if hidden is None else hidden.restore
    return Streamer(host.buffer, pool.buffer, SLOTS, settings.overlap, copy, project)


def _hidden_groups(settings: EllmConfig, shape: PoolShape, configurator: Any) -> int:
    """Layer groups, from the lowest, of which hidden states are kept."""
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.runtime_context import get_parallel

    keeps = settings.host_keeps
    if not settings.keeps_hidden:
        return 0
    if configurator.device != "cpu":
        raise ConfigError(
            f"--ellm-host-keeps {keeps}: hidden states are captured on CPU hosts only so far "
            "(replayed CUDA graphs run no hooks); give kv"
        )
    if keeps == "hidden":
        return shape.num_groups
    if keeps == "mixed":
        model = model_shape(configurator.model_config, get_parallel().attn_tp_size)
        hardware = get_tp_group().broadcast_object(measure_device(configurator.device))
        layers = hidden_layers(model, hardware, settings.hidden_on == DEVICE)
        return round(layers / shape.layer_group)
    return -(-int(keeps) // shape.layer_group)
