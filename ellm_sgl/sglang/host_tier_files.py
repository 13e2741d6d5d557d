"""The host tier's files, before any process starts: are their names free, is there room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ellm_sgl.config import MIXED, EllmConfig
from ellm_sgl.host_file import check_space, file_of
from ellm_sgl.memory import HiddenPool, KVPool, PoolShape
from ellm_sgl.sglang.host_tier import groups_given


def check_files(settings: EllmConfig, args: Any) -> None:
    """Refuse names that are taken, and more bytes than there is room for.

    Args:
        args: SGLang's `ServerArgs`, its defaults filled in.

    Raises:
        ConfigError: as `host_file.check_space`.
    """
    if settings.host_path is not None:
        check_space(settings.host_path, files(settings, args))


def files(settings: EllmConfig, args: Any) -> dict[Path, int]:
    """The files of the processes on this machine, and the bytes of each; 0 where only the server
    itself will know: it measures how many layers to keep hidden states of, and SGLang chooses the
    KV's dtype."""
    assert settings.host_path is not None
    kv, hidden = 0, 0
    if settings.host_keeps != MIXED and args.kv_cache_dtype == "auto":
        kv, hidden = _bytes(settings, args.get_model_config(), args.tp_size)
    on_this = args.tp_size // args.nnodes
    ranks = range(args.node_rank * on_this, (args.node_rank + 1) * on_this)
    found = {file_of(settings.host_path, rank, args.tp_size): kv for rank in ranks}
    if settings.hidden_in_file:
        for rank in ranks:
            found[file_of(settings.host_path, rank, args.tp_size, hidden=True)] = hidden
    return found


def _bytes(settings: EllmConfig, model: Any, tp_size: int) -> tuple[int, int]:
    """Of one process's KV, and of its hidden states: the sizes of the pools."""
    layers = model.num_hidden_layers
    shape = PoolShape(layers, min(settings.layer_group, layers), settings.block_tokens)
    groups = groups_given(settings, shape) if settings.keeps_hidden else 0
    blocks = settings.host_kv_tokens // shape.block_tokens
    heads = model.get_num_kv_heads(tp_size)
    kv_units = blocks * (shape.num_groups - groups) + 1  # one of scratch
    hidden_unit = shape.layer_group * shape.block_tokens * model.hidden_size * model.dtype.itemsize
    return (
        kv_units * KVPool.bytes_per_unit(shape, heads, model.head_dim, model.dtype),
        HiddenPool.units_of(groups, blocks) * hidden_unit,
    )
