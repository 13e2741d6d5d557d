"""What KV depends on besides its tokens, in one number; and the store of what has it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ellm_sgl.config.sizes import read_size
from ellm_sgl.host_file import file_of
from ellm_sgl.kernels.cpu.build import source_hash
from ellm_sgl.kernels.cpu.library import ANY_SIZE, ISA_VARIABLE, instruction_set, load
from ellm_sgl.memory import KVPool
from ellm_sgl.sglang.kv_store import StoredPrefixes
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.store import BlockStore, StoreFolder, most_buffered
from ellm_sgl.worker import Worker

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from ellm_sgl.sglang.context import Context

logger = logging.getLogger(__name__)

FORMAT = 3
"""Of what is stored; another one where the layout of a unit or the kernels' rounding changes."""


def open_prefixes(ours: Context, scheduler: Scheduler, least_of_ranks: Any) -> StoredPrefixes:
    """The store that the settings name, for this rank's KV.

    Raises:
        ConfigError: its folder cannot be used.
    """
    settings, ranks = ours.settings, adapter().ranks(scheduler)
    assert settings.kv_store is not None
    path = file_of(settings.kv_store, ranks.tp_rank, ranks.tp_size)
    size = read_size(settings.kv_store_size) // ranks.tp_size
    folder = StoreFolder(Path(path), size)
    worker = Worker("ellm-kv-store")
    block_bytes, at_once = _block_bytes(ours.pool), _chunk_blocks(ours, scheduler)
    ours.memory.store = most_buffered(block_bytes, at_once)

    def opened() -> BlockStore:
        began = time.monotonic()
        model = scheduler.tp_worker.model_runner.model
        mark = _of_all_ranks(fingerprint(model, _facts(ours, scheduler)), scheduler)
        store = BlockStore(folder, mark, block_bytes, worker.submit, at_once)
        logger.info(
            "eLLM KV store %s: %d tokens of this model (fingerprint %s, %.1f s)",
            path, len(store.index) * ours.table.shape.block_tokens, mark, time.monotonic() - began,
        )  # fmt: skip
        return store

    cache: Any = ours.prefix_cache
    found = StoredPrefixes(opened, ours.elastic, ours.pool, cache, least_of_ranks)
    ours.memory.queued = found.queued_bytes
    return found


def fingerprint(model: nn.Module, facts: dict[str, Any]) -> str:
    """32 hexadecimal digits of everything in `facts`, and of all weights and tables of the model,
    such as RoPE's: read once, about a second per gigabyte."""
    digest = hashlib.blake2b(
        json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16
    )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        data = (tensor.to_dense() if tensor.is_mkldnn else tensor).cpu().contiguous()
        crc = zlib.crc32(data.view(-1).view(torch.uint8).numpy().data) if data.numel() else 0
        digest.update(f"{name} {data.dtype} {tuple(data.shape)} {crc}".encode())
    return digest.hexdigest()


def _of_all_ranks(mark: str, scheduler: Scheduler) -> str:
    """One fingerprint of those of all ranks, which ask in the same turn: a layer's output is the
    sum of what each of them computes, so that the KV of one depends on the weights of all."""
    size = adapter().ranks(scheduler).tp_size
    if size == 1:
        return mark
    marks = [""] * size
    torch.distributed.all_gather_object(marks, mark, scheduler.tp_group.cpu_group)
    return hashlib.blake2b("".join(marks).encode(), digest_size=16).hexdigest()


def _facts(ours: Context, scheduler: Scheduler) -> dict[str, Any]:
    """How KV is computed, and how it lies in a unit."""
    import sglang

    shape, buffer, ranks = ours.table.shape, ours.pool.buffer, adapter().ranks(scheduler)
    model = dict(scheduler.model_config.hf_config.to_dict())
    model.pop("_name_or_path", None)
    kernels = None
    if load().library is not None:
        limit = os.environ.get(ISA_VARIABLE)
        # Attention's, and that of all else: its best depends on no size.
        sets = [instruction_set(size, limit) for size in (buffer.shape[-1], ANY_SIZE)]
        kernels = [source_hash(), *sets]
    return {
        "format": FORMAT,
        "sglang": sglang.__version__,
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
        "kernels": kernels,
        "model": model,
        "dtype": str(scheduler.model_config.dtype),
        "kv": [str(buffer.dtype), *buffer.shape[1:]],
        "layers": [shape.num_layers, shape.layer_group, shape.block_tokens],
        "rank": [ranks.tp_rank, ranks.tp_size],
    }


def _chunk_blocks(ours: Context, scheduler: Scheduler) -> int:
    """Most blocks that a prefill completes, with the one that the chunk before began."""
    arguments = adapter().resolved(scheduler.server_args)
    tokens = scheduler.chunked_prefill_size or arguments.max_prefill_tokens
    return ours.table.shape.blocks_for(tokens) + 1


def _block_bytes(pool: KVPool) -> int:
    return pool.unit_bytes * pool.shape.num_groups
