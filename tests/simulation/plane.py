"""The memory plane of one rank, built by the functions that build a server's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from ellm_sgl.config import EllmConfig
from ellm_sgl.memory import KVPool
from ellm_sgl.memory.shape import NONE, IntArray
from ellm_sgl.sglang import host_tier, memory, prefix_cache
from ellm_sgl.sglang.context import Context
from ellm_sgl.step import DeviceStreamer, HiddenStates, StepPlan, Streamer
from ellm_sgl.step.transfer import GraphFetch
from ellm_sgl.step.transfer import cuda as cuda_streamer
from tests.memory.fake_arena import FakeArena
from tests.simulation.configuration import Configuration
from tests.simulation.model import StampDecoder
from tests.simulation.stamps import POISON, Stamps
from tests.simulation.streams import Device
from tests.simulation.transfers import LateWorker
from tests.step.listed import copy_listed

DTYPE = torch.float64


class Plane:
    """Page table, pools, elastic memory, allocator and prefix tree of one rank."""

    def __init__(self, configuration: Configuration, host_path: Path | None = None) -> None:
        self.configuration = configuration
        self.worker = LateWorker()
        self.committer = LateWorker()
        """What commits memory: as late."""
        self.writer = LateWorker()
        """What writes to the store."""
        self.device = Device() if configuration.streams else None
        """Where it works behind the host's back; else the host computes."""
        self.streamer: Any = None
        self.fetch: GraphFetch | None = None
        """Of steps that a device would replay."""
        self.host_pool: KVPool | None = None
        settings = _settings(configuration, host_path)
        config, configurator = _configurator(configuration)
        with (
            patch.object(memory, "_settings", lambda: settings),
            patch.object(memory, "make_streamer", self._make_streamer),
            patch.object(memory, "_arena", self._arena),
        ):
            memory.widen_logical_capacity(config, configurator)
            kv_cache = memory.build_pool(_never, configurator, sizes=config)
            self.allocator = memory.build_allocator(
                _never, configurator, sizes=config, token_to_kv_pool=kv_cache
            )
        self.logical_tokens: int = config.max_total_num_tokens
        self.context: Context = self.allocator.ellm
        self.table, self.elastic = self.context.table, self.context.elastic
        self.pool = self.context.pool
        self.arena = self.pool.arena
        self.req_to_token_pool = ReqToTokenPool(
            size=configuration.max_running,
            max_context_len=configuration.context + configuration.block_tokens,
            device="cpu",
            enable_memory_saver=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=configuration.block_tokens,
        )
        context: Any = SimpleNamespace(disable_radix_cache=not configuration.radix, params=params)
        self.tree = prefix_cache._build(context)
        self.runner: Any = SimpleNamespace(
            model=SimpleNamespace(model=StampDecoder(configuration.layers)),
            token_to_kv_pool_allocator=self.allocator,
        )
        self._buffers = [
            (self.pool.keys(layer).numpy()[..., 0, 0], self.pool.values(layer).numpy()[..., 0, 0])
            for layer in range(configuration.layers)
        ]
        self.pool.buffer[: self.table.committed_units + 1] = POISON

    def kv_of(self, layer: int) -> tuple[Stamps, Stamps]:
        """K and V of one layer, each a view [units + 1, block_tokens]."""
        return self._buffers[layer]

    def compute(self, work: Callable[[], None]) -> None:
        """Do this on the device, behind what it has been given before."""
        if self.device is not None:
            self.device.current_stream().put(work)
            return
        self.worker.pass_time()
        work()

    def poison(self) -> None:
        """Spoil what nobody owns as the step begins: whoever reads it was promised nothing."""
        table = self.table
        free = table._free_units.ids
        self.compute(partial(_spoil, self.pool, free[free <= table.committed_units]))
        if self.host_pool is not None:
            spoil = partial(_spoil, self.host_pool, table.host._free.ids)
            if self.device is None:
                spoil()
            else:
                self.streamer._stream.put(spoil)
        if (hidden := self.context.executor.hidden) is not None:
            owned = table.host._slots_of(np.arange(table.num_blocks + 1, dtype=np.int32))
            free = np.setdiff1d(np.arange(table.host._slots.capacity + 1), owned[owned != NONE])
            for layer in range(hidden.num_layers):
                hidden._states.slots(layer)[torch.from_numpy(free)] = POISON

    def streamer_of(self, plan: StepPlan) -> Any:
        """What brings this step's units: where a device would replay it, the graph."""
        new = plan.groups[0].requests
        if self.fetch is None or plan.recomputed_rows or any(r.new.size > 1 for r in new):
            return self.streamer
        assert self.fetch.fits(plan.transfers)
        self.fetch.load(plan.transfers)
        return self.fetch

    def _arena(self, _: Any) -> Any:
        """On a host: a unit's memory comes and goes alone. CUDA devices have no arena so far."""
        return None if self.configuration.streams else lambda nbytes: FakeArena(nbytes, granule=8)

    @contextmanager
    def living(self) -> Iterator[None]:
        """Copies between pools are the device's to make, where it has streams."""
        copy, device = cuda_streamer._copy_units, self.device
        if device is None:
            yield
            return

        def copy_later(*args: Any) -> None:
            device.current_stream().put(partial(copy, *args))

        with patch.object(cuda_streamer, "_copy_units", copy_later):
            yield

    def _make_streamer(
        self, settings: EllmConfig, host_units: int, pool: KVPool, hidden: HiddenStates | None
    ) -> Any:
        """The host tier as a server makes it, but transfers are as late as the life says."""
        made: Any = host_tier.make_streamer(settings, host_units, pool, hidden)
        self.host_pool = KVPool(pool.shape, host_units, 1, 1, DTYPE, "cpu")
        self.host_pool.buffer = made._host.fill_(POISON)
        if (device := self.device) is not None:
            with patch.object(torch, "get_device_module", lambda _: device):
                self.streamer = DeviceStreamer(
                    made._host, pool.buffer, host_tier.SLOTS, settings.overlap
                )
                if settings.overlap:
                    self.fetch = _LateFetch(device, made._host, pool)
            return self.streamer
        self.streamer = Streamer(
            made._host,
            pool.buffer,
            host_tier.SLOTS,
            settings.overlap,
            project=None if hidden is None else hidden.restore,
            submit=self.worker.submit,
        )
        return self.streamer


class _LateFetch(GraphFetch):
    """What a graph copies, and what it is told, are behind what its stream has to do before."""

    def __init__(self, device: Device, host: torch.Tensor, pool: KVPool) -> None:
        self._late = device
        super().__init__(
            host, pool.buffer, host_tier.SLOTS, pool.shape.num_groups, pool.num_units, self._copy
        )

    def _tell(self, lists: Any, counts: Any) -> None:
        self._late.current_stream().put(partial(super()._tell, lists, counts))

    def _copy(self, *listed: torch.Tensor) -> None:
        self._late.current_stream().put(partial(copy_listed, *listed))


def _spoil(pool: KVPool, free: IntArray) -> None:
    pool.buffer[torch.from_numpy(free)] = POISON
    pool.buffer[0] = POISON


def _settings(configuration: Configuration, host_path: Path | None) -> EllmConfig:
    block = configuration.block_tokens
    return EllmConfig(
        layer_group=configuration.layer_group,
        block_tokens=block,
        device_kv_tokens=configuration.device_blocks * block,
        max_device_kv_tokens=configuration.most_blocks * block,
        host_kv_tokens=configuration.host_blocks * block,
        host_path=str(host_path) if host_path and configuration.host_blocks else None,
        host_keeps=str(configuration.hidden_layers) if configuration.hidden_layers else "kv",
        hidden_on="device" if configuration.hidden_on_device else "host",
        overlap=configuration.prefetch,
    )


def _configurator(configuration: Configuration) -> tuple[Any, Any]:
    """SGLang's `MemoryPoolConfig` and `KVCacheConfigurator`, as far as eLLM looks at them."""
    config = SimpleNamespace(
        max_total_num_tokens=configuration.device_blocks * configuration.block_tokens,
        max_running_requests=configuration.max_running,
    )
    model = SimpleNamespace(
        context_len=configuration.context,
        hidden_size=1,
        head_dim=1,
        dtype=DTYPE,
        get_num_kv_heads=lambda ranks: 1,
    )
    layers = configuration.layers
    configurator = SimpleNamespace(
        model_config=model,
        layer_info=SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
        kv_cache_dtype=DTYPE,
        device="cpu",
        server_args=SimpleNamespace(
            max_prefill_tokens=configuration.max_prefill,
            max_running_requests=configuration.max_running,
            dp_size=1,
        ),
    )
    return config, configurator


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own pool was asked for")
