"""The pool and the allocator that SGLang sees."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache

from ellm_sgl.config import RECOMPUTE, ConfigError, EllmConfig
from ellm_sgl.memory import Arena, CpuArena, KVPool, OutOfBlocksError, PageTable
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.host_memory import check_pinned, tokens_within
from ellm_sgl.sglang.host_tier import (
    SLOTS,
    device_units,
    hidden_groups,
    make_hidden_pool,
    make_streamer,
    most_host_bytes,
    pool_shape,
    pool_sizes,
)
from ellm_sgl.sglang.join_budget import make_sizing
from ellm_sgl.sglang.token_slots import Integers, PagedSlots
from ellm_sgl.sglang.versions import adapter
from ellm_sgl.step import AnyStreamer, HiddenStates

logger = logging.getLogger(__name__)

_DEVICE_TOKENS = "_ellm_device_tokens"
"""Attribute of SGLang's model config (its configurator takes none): tokens that the device pool
holds at the start, and at most, decided before SGLang learns of the larger logical capacity."""

_SLOT_TABLE_BYTES = 1 << 30
"""Of SGLang's table of every request's slots, 4 bytes for each token of context, where nobody has
said how many requests may run: with a context of a million tokens it would be 8.6 GB. Up to
131,072 tokens of context SGLang's own least number of requests, 2,048, fits."""


def widen_logical_capacity(config: Any, configurator: Any, *_: Any, **__: Any) -> Any:
    """Hook after `_resolve_memory_pool_config`: SGLang gets logical capacity, we the physical.

    There are addresses for whatever else lets requests run: all that the device ever holds and all
    that the host does, all that a step may recompute, and a block being filled for every request;
    and always for four times the device and two requests of the model's full context.

    In mode recompute there are as many as the device holds: SGLang then admits, retracts and
    refuses by what is there, and no block is ever without memory.
    """
    settings = _settings()
    _bound_requests(config, configurator)
    block = settings.block_tokens
    chosen = settings.device_kv_tokens or config.max_total_num_tokens
    from sglang.srt.runtime_context import get_parallel

    shape, unit_bytes, hidden_bytes = pool_sizes(
        settings, configurator.model_config, get_parallel().attn_tp_size,
        configurator.layer_info.num_effective_layers, configurator.kv_cache_dtype,
    )  # fmt: skip
    host_bytes = most_host_bytes(settings, shape, unit_bytes, hidden_bytes)
    if configurator.device != "cpu":
        check_pinned(settings, host_bytes, configurator)
    else:
        token_bytes = unit_bytes * shape.num_groups // shape.block_tokens
        chosen = tokens_within(settings, chosen, token_bytes, host_bytes, configurator)
    device = chosen // block * block
    most = _most_tokens(settings, device)
    setattr(configurator.model_config, _DEVICE_TOKENS, (device, most))
    if settings.mode == RECOMPUTE:
        config.max_total_num_tokens = device
        return config
    logical = max(
        most
        + settings.host_kv_tokens
        + _max_restored_tokens(configurator)
        + config.max_running_requests * block,
        4 * most + 2 * configurator.model_config.context_len,
    )
    config.max_total_num_tokens = -(-logical // block) * block
    return config


def _bound_requests(config: Any, configurator: Any) -> None:
    """As many requests at most as `_SLOT_TABLE_BYTES` has rows for, unless the user said more."""
    if adapter().resolved(configurator.server_args).max_running_requests is not None:
        return
    context = configurator.model_config.context_len
    most = max(_SLOT_TABLE_BYTES // (4 * context), 1)
    if config.max_running_requests > most:
        logger.info(
            "eLLM: %d requests run at most, not %d: for a context of %d tokens SGLang's table of "
            "their slots would take %.1f GB (--max-running-requests says otherwise)",
            most, config.max_running_requests, context,
            4 * context * config.max_running_requests / 1e9,
        )  # fmt: skip
        config.max_running_requests = most


def build_pool(original: Callable[..., Any], configurator: Any, *, sizes: Any, **_: Any) -> KVCache:
    """Hook around `_build_token_to_kv_pool`: our pool, and with it this process's context."""
    from sglang.srt.runtime_context import get_parallel

    settings = _settings()
    model = configurator.model_config
    layers = configurator.layer_info.num_effective_layers
    shape = pool_shape(settings, layers)
    logical_tokens = sizes.max_total_num_tokens
    heads, head_dim = model.get_num_kv_heads(get_parallel().attn_tp_size), model.head_dim
    dtype = configurator.kv_cache_dtype
    host_units = settings.host_kv_tokens // shape.block_tokens * shape.num_groups
    groups = hidden_groups(settings, shape, configurator) if host_units else 0
    hidden_bytes = model.hidden_size * model.dtype.itemsize
    unit_bytes = KVPool.bytes_per_unit(shape, heads, head_dim, dtype)
    units, most = (
        device_units(settings, shape, tokens, groups, hidden_bytes, unit_bytes)
        for tokens in getattr(model, _DEVICE_TOKENS)
    )
    blocks = logical_tokens // shape.block_tokens
    reserve = _arena(configurator)
    if reserve is None and most > units:
        raise ConfigError(
            f"--ellm-max-device-kv-tokens {settings.max_device_kv_tokens}: the pool grows on CPU "
            "hosts only so far; leave it out"
        )
    table = PageTable(shape, blocks, most, host_units, groups, units)
    try:
        pool = KVPool(
            shape, most, heads, head_dim, dtype, configurator.device, None, False, reserve, units
        )
    except MemoryError as error:
        raise ConfigError(f"{_flag_of_size(settings)}: {error}; give fewer") from None
    hidden: HiddenStates | None = None
    if groups:
        hidden = HiddenStates(make_hidden_pool(settings, shape, groups, configurator), pool)
    streamer: AnyStreamer | None = None
    if host_units:
        streamer = make_streamer(settings, table.host.kv_units, pool, hidden)
    max_restored = _max_restored_tokens(configurator)
    arguments = adapter().resolved(configurator.server_args)
    ranks = get_parallel().tp_size * arguments.dp_size  # which all have this machine's memory
    ours = Context(settings, table, pool, max_restored, SLOTS, streamer, hidden, ranks)
    ours.sizing = make_sizing(settings, table, pool, arguments)
    units = table.unit_limit
    logger.info(
        "eLLM pool: %d tokens on the device (%d units of %d layers x %d tokens, %.1f MB), "
        "%d at most, %d tokens logical",
        shape.tokens_in(units), units, shape.layer_group, shape.block_tokens,
        pool.bytes_behind(units) / 1e6, shape.tokens_in(most), logical_tokens,
    )  # fmt: skip
    return EllmKVCache(ours, logical_tokens, configurator)


def build_allocator(
    original: Callable[..., Any], configurator: Any, *, sizes: Any, token_to_kv_pool: Any, **_: Any
) -> BaseTokenToKVPoolAllocator:
    """Hook around `_build_token_to_kv_pool_allocator`."""
    return EllmAllocator(
        sizes.max_total_num_tokens,
        token_to_kv_pool.ellm.table.shape.block_tokens,
        configurator.kv_cache_dtype,
        configurator.device,
        token_to_kv_pool,
        need_sort=False,
    )


def _max_restored_tokens(configurator: Any) -> int:
    """Most tokens that a step can recompute: those of the longest request, or of a prefill."""
    context: int = configurator.model_config.context_len
    return max(context, adapter().resolved(configurator.server_args).max_prefill_tokens)


def _most_tokens(settings: EllmConfig, start: int) -> int:
    """Tokens, whole blocks, that the device pool may ever hold.

    Raises:
        ConfigError: fewer than it starts with.
    """
    if settings.max_device_kv_tokens is None:
        return start
    most = settings.max_device_kv_tokens // settings.block_tokens * settings.block_tokens
    if most < start:  # one that was given has been checked before: this is SGLang's choice
        raise ConfigError(
            f"--ellm-max-device-kv-tokens {settings.max_device_kv_tokens}: the pool starts with "
            f"room for {start} tokens; give as many, or fewer --ellm-device-kv-tokens"
        )
    return most


def _flag_of_size(settings: EllmConfig) -> str:
    """What decides how many addresses and how much memory there has to be, with its value."""
    if settings.max_device_kv_tokens is not None:
        return f"--ellm-max-device-kv-tokens {settings.max_device_kv_tokens}"
    given = settings.device_kv_tokens
    return "--ellm-device-kv-tokens" + ("" if given is None else f" {given}")


def _arena(configurator: Any) -> Callable[[int], Arena] | None:
    """What the device pool lies over; on CUDA devices plain memory so far."""
    return CpuArena if configurator.device == "cpu" else None


def _settings() -> EllmConfig:
    settings = EllmConfig.from_env()
    assert settings is not None, "hooks of an enabled server run where eLLM is not enabled"
    return settings


class EllmKVCache(KVCache):
    """Our pool as SGLang's `KVCache`. Indices of its buffers are units, not slots."""

    def __init__(self, ellm: Context, logical_tokens: int, configurator: Any) -> None:
        pool = ellm.pool
        super().__init__(
            logical_tokens,
            pool.shape.block_tokens,
            pool.buffer.dtype,
            pool.shape.num_layers,
            configurator.device,
            enable_memory_saver=False,
            start_layer=configurator.layer_info.start_layer,
            end_layer=configurator.layer_info.end_layer,
        )
        self.ellm = ellm
        self.pool = pool
        self._finalize_allocation_log(pool.shape.tokens_in(ellm.table.committed_units))

    def get_kv_size_bytes(self) -> int:
        return self.pool.bytes_behind(self.ellm.table.committed_units)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pool.keys(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.pool.values(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("KV is written by eLLM's attention backend, never by slot")


class EllmAllocator(PagedSlots, BaseTokenToKVPoolAllocator):
    """Logical slots from the page table. A page of SGLang's is a token block of ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ellm: Context = self._kvcache.ellm
        """Where hooks find it (`context.context_of`)."""
        self._table = self.ellm.table
        self.release_pages = torch.empty(0, dtype=torch.int64)

    @property
    def free_pages(self) -> torch.Tensor:
        """Free logical pages, for SGLang's own invariant checks."""
        return torch.from_numpy(self._table.free_block_ids.astype("int64"))

    @free_pages.setter
    def free_pages(self, _: None) -> None:
        """The base class's constructor sets None; the page table is what counts."""

    def available_size(self) -> int:
        return self._table.free_blocks * self.page_size

    def clear(self) -> None:
        """Free everything (`/flush_cache`, with nothing running; the tree is reset beside it)."""
        self._table.clear()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        zero = torch.zeros(1, dtype=torch.int64)
        need = torch.tensor([need_size])
        return self.alloc_extend(zero, zero, need, need, zero - 1, need_size)

    def take_pages(self, count: int) -> Integers | None:
        """So many blocks, with units as far as there are any: `check_decode_mem` makes room before,
        but a step that mixes prefill with decoding does not ask it, and prompts evict nobody who
        decodes. Blocks for which no unit is left exist only while a step computes them."""
        if count == 0:
            return np.empty(0, np.int64)
        elastic = self.ellm.elastic
        with elastic.totals.bookkeeping():
            try:
                return elastic.allocate(count, self.ellm.may_evict).astype(np.int64)
            except OutOfBlocksError:
                return None

    def free(self, free_index: torch.Tensor) -> None:
        if adapter().holds_frees(self):
            self.free_group.append(free_index.clone())  # it may be part of a row in use
            return
        with self.ellm.elastic.totals.bookkeeping():
            self._table.release(torch.unique(free_index // self.page_size).cpu().numpy())

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        # Tokens of a page are neighbours in a request's row: one of each page is enough.
        tail = free_index[-start_pos % self.page_size :: self.page_size]
        head = free_index[:1] if start_pos % self.page_size else free_index[:0]
        self.free(torch.cat([head, tail]))
