"""What keeps KV, or hidden states, beside the device pool, and what brings it back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ellm_sgl.config import DEVICE, MIXED, ConfigError, EllmConfig
from ellm_sgl.host_file import check_space, file_of
from ellm_sgl.kernels.choose import choose_copy
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.latency import hidden_layers
from ellm_sgl.memory import HiddenPool, KVPool, PoolShape
from ellm_sgl.sglang.calibration import measure_device, model_shape
from ellm_sgl.step import AnyStreamer, DeviceStreamer, HiddenStates, NativeStreamer, Streamer
from ellm_sgl.store import check_folder

logger = logging.getLogger(__name__)

SLOTS = 2
"""Layer groups whose fetched units a step holds at once: one computes, the next arrives."""


def pool_shape(settings: EllmConfig, layers: int) -> PoolShape:
    """Of the device's pool, and of the host's."""
    return PoolShape(layers, min(settings.layer_group, layers), settings.block_tokens)


def hidden_groups(settings: EllmConfig, shape: PoolShape, configurator: Any) -> int:
    """Layer groups, from the lowest, of which hidden states are kept.

    Raises:
        ConfigError: on CUDA devices, so far.
    """
    if not settings.keeps_hidden:
        return 0
    if configurator.device != "cpu":
        raise ConfigError(
            f"--ellm-host-keeps {settings.host_keeps}: hidden states are captured on CPU hosts "
            "only so far (replayed CUDA graphs run no hooks); give kv"
        )
    if settings.host_keeps != MIXED:
        return _groups_given(settings, shape)
    groups = _balanced_groups(settings, shape, configurator)
    logger.info(
        "eLLM hidden states: of %d of %d layer groups, which balances link and processor%s",
        groups, shape.num_groups, "" if groups else ": all others keep KV, on the host",
    )  # fmt: skip
    return groups


def _balanced_groups(settings: EllmConfig, shape: PoolShape, configurator: Any) -> int:
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.runtime_context import get_parallel

    model = model_shape(configurator.model_config, get_parallel().attn_tp_size)
    hardware = get_tp_group().broadcast_object(measure_device(configurator.device))
    layers = hidden_layers(model, hardware, settings.hidden_on == DEVICE)
    return round(layers / shape.layer_group)


def _groups_given(settings: EllmConfig, shape: PoolShape) -> int:
    """Where they are not left to what balances."""
    if not settings.keeps_hidden:
        return 0
    if settings.host_keeps == "hidden":
        return shape.num_groups
    return -(-int(settings.host_keeps) // shape.layer_group)


def make_hidden_pool(
    settings: EllmConfig, shape: PoolShape, groups: int, configurator: Any
) -> HiddenPool:
    """Room for the hidden states of as many tokens as the host tier is to keep.

    Args:
        groups: of which they are kept.

    Raises:
        ConfigError: their file cannot be had.
    """
    model = configurator.model_config
    file = _file(settings, hidden=True) if settings.hidden_in_file else None
    device = configurator.device if settings.hidden_on == DEVICE else "cpu"
    slots = settings.host_kv_tokens // shape.block_tokens
    pool = HiddenPool(shape, groups, slots, model.hidden_size, model.dtype, device, file)
    logger.info(
        "eLLM hidden states: %d of %d layer groups, %.1f MB on the %s",
        groups, shape.num_groups, pool.buffer.nbytes / 1e6, settings.hidden_on,
    )  # fmt: skip
    return pool


def _file(settings: EllmConfig, hidden: bool = False) -> Path | None:
    """Of this process; None where the host tier is in memory."""
    from sglang.srt.runtime_context import get_parallel

    if settings.host_path is None:
        return None
    return file_of(settings.host_path, get_parallel().tp_rank, get_parallel().tp_size, hidden)


def device_units(
    settings: EllmConfig,
    shape: PoolShape,
    tokens: int,
    groups: int,
    hidden_bytes: int,
    unit_bytes: int,
) -> int:
    """Units of KV that a device pool of so many tokens has, beside the hidden states it keeps.

    Args:
        groups: layer groups of which hidden states are kept.
        hidden_bytes: size of a token's hidden state in one layer.
        unit_bytes: size of a unit of KV.

    Raises:
        ConfigError: they leave no room for a block.
    """
    units = shape.blocks_for(tokens) * shape.num_groups
    if settings.hidden_on != DEVICE or not groups:
        return units
    slots = settings.host_kv_tokens // shape.block_tokens
    hidden_unit = shape.layer_group * shape.block_tokens * hidden_bytes
    taken = HiddenPool.units_of(groups, slots) * hidden_unit
    left = units - -(-taken // unit_bytes)
    if left < shape.num_groups:
        as_tokens = (units - left) * shape.block_tokens // shape.num_groups
        raise ConfigError(
            f"--ellm-hidden-on {DEVICE}: the hidden states of {settings.host_kv_tokens} tokens "
            f"(--ellm-host-kv-tokens) take as much memory as {as_tokens} tokens of KV, and the "
            f"device pool holds {tokens}; give fewer, or more --ellm-device-kv-tokens"
        )
    return left


def check_room(settings: EllmConfig, model: Any, tp_size: int) -> None:
    """Before any process starts: raise what `device_units` will, where the sizes are known by then.

    Args:
        model: SGLang's `ModelConfig`.
        tp_size: ranks that share the KV heads.
    """
    tokens = settings.device_kv_tokens
    if tokens is None or not settings.keeps_hidden or settings.host_keeps == MIXED:
        return
    shape, unit_bytes, hidden_bytes = _sizes(settings, model, tp_size)
    groups = _groups_given(settings, shape)
    whole_blocks = tokens // shape.block_tokens * shape.block_tokens
    device_units(settings, shape, whole_blocks, groups, hidden_bytes, unit_bytes)


def check_files(settings: EllmConfig, args: Any, model: Any) -> None:
    """Before any process starts: raise ConfigError for names that are taken or cannot be made, and
    for more bytes than there is room for.

    Args:
        args: SGLang's `ServerArgs`, its defaults filled in.
        model: its `ModelConfig`.
    """
    if settings.host_path is not None:
        check_space(settings.host_path, files(settings, args, model))
    if settings.kv_store is not None:
        for rank in range(args.tp_size):
            check_folder(file_of(settings.kv_store, rank, args.tp_size))


def files(settings: EllmConfig, args: Any, model: Any) -> dict[Path, int]:
    """The files of the server's processes, and the bytes of each; 0 where only the server
    itself will know: it measures how many layers to keep hidden states of, and SGLang chooses the
    KV's dtype."""
    assert settings.host_path is not None
    path, kv, hidden = settings.host_path, 0, 0
    if settings.host_keeps != MIXED and args.kv_cache_dtype == "auto":
        shape, unit_bytes, hidden_bytes = _sizes(settings, model, args.tp_size)
        groups = _groups_given(settings, shape)
        kv, hidden = _bytes_kept(settings, shape, groups, unit_bytes, hidden_bytes)
    ranks = range(args.tp_size)
    found = {file_of(path, rank, args.tp_size): kv for rank in ranks}
    if settings.hidden_in_file:
        found |= {file_of(path, rank, args.tp_size, hidden=True): hidden for rank in ranks}
    return found


def most_host_bytes(
    settings: EllmConfig, shape: PoolShape, unit_bytes: int, hidden_bytes: int
) -> int:
    """What one process's host tier takes beside the device pool; the most that it may come to
    where the server is yet to measure how many layers to keep hidden states of.

    Args:
        unit_bytes: size of a unit of KV.
        hidden_bytes: size of a token's hidden state in one layer.
    """
    if not settings.host_kv_tokens:
        return 0
    mixed = settings.host_keeps == MIXED
    found = []
    for groups in (0, shape.num_groups) if mixed else (_groups_given(settings, shape),):
        kv, hidden = _bytes_kept(settings, shape, groups, unit_bytes, hidden_bytes)
        found.append(kv if settings.hidden_on == DEVICE else kv + hidden)
    return max(found)


def _bytes_kept(
    settings: EllmConfig, shape: PoolShape, groups: int, unit_bytes: int, hidden_bytes: int
) -> tuple[int, int]:
    """Of one process's host tier: KV, and hidden states of so many groups."""
    blocks = settings.host_kv_tokens // shape.block_tokens
    kv = (blocks * (shape.num_groups - groups) + 1) * unit_bytes  # one of scratch
    hidden_unit = shape.layer_group * shape.block_tokens * hidden_bytes
    return kv, HiddenPool.units_of(groups, blocks) * hidden_unit


def pool_sizes(
    settings: EllmConfig, model: Any, tp_size: int, layers: int, kv_type: torch.dtype
) -> tuple[PoolShape, int, int]:
    """Of one process's pools: their shape, the bytes of a unit of KV, and those of a token's hidden
    state in one layer."""
    shape = pool_shape(settings, layers)
    heads = model.get_num_kv_heads(tp_size)
    unit_bytes = KVPool.bytes_per_unit(shape, heads, model.head_dim, kv_type)
    return shape, unit_bytes, model.hidden_size * model.dtype.itemsize


def _sizes(settings: EllmConfig, model: Any, tp_size: int) -> tuple[PoolShape, int, int]:
    """`pool_sizes` with KV in the model's dtype, before SGLang has looked at its layers."""
    return pool_sizes(settings, model, tp_size, model.num_hidden_layers, model.dtype)


def make_streamer(
    settings: EllmConfig, host_units: int, pool: KVPool, hidden: HiddenStates | None
) -> AnyStreamer:
    """The host's units of KV, and what exchanges them with the device pool.

    Args:
        host_units: that hold KV.
        pool: the device's.

    Raises:
        ConfigError: a setting that CUDA devices lack so far, a file that cannot be had.
    """
    shape, device = pool.shape, pool.buffer.device
    if shape.num_groups <= SLOTS:
        logger.warning(
            "--ellm-layer-group %d makes %d layer groups: fetching from the host gains memory "
            "only with more than %d; give a smaller number",
            shape.layer_group, shape.num_groups, SLOTS,
        )  # fmt: skip
    heads, head_dim = pool.buffer.shape[-2:]
    path = _file(settings)
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
    project = None if hidden is None else hidden.restore
    return Streamer(host.buffer, pool.buffer, SLOTS, settings.overlap, choose_copy(), project)
