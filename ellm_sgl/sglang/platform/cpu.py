"""SGLang on any x86 CPU: an out-of-tree platform built from SGLang's own parts.

SGLang's CPU engine needs a build of sgl-kernel with AMX; this platform needs none of it: layers
run their `forward_native`, attention is our C++ kernels' (`CpuAttention`, or eLLM's when enabled)
where they are built, else `torch_native`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from ellm_sgl.config import EllmConfig
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.sglang.platform_entry import ATTENTION_BACKEND

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

CPU_BACKEND = "ellm_cpu"
"""`attention.CpuAttention`, for stock SGLang."""
ONEDNN_KEEPS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN's compiled products and PyTorch's, which are of one number of rows each, half a megabyte:
enough for those of a step, which its layers have in common. By default 1,024 of each stay."""
_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


class EllmCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An x86 host without accelerator and without AMX."""

    _enum = PlatformEnum.OOT

    def get_device(self, local_rank: int = 0) -> Any:
        # SGLang's base class answers a torch.device, but its only caller takes a string apart.
        return "cpu"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        # On a CPU, SGLang has by now put its AMX backend in the place of no answer.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = self.get_default_attention_backend()
        server_args.sampling_backend = "pytorch"
        # "Device memory" is the host's, which others use too: half of what is free, not 90 %.
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = 0.5
        # SGLang's xgrammar glue needs pinned memory and a GPU kernel; llguidance's needs neither.
        if server_args.grammar_backend is None:
            server_args.grammar_backend = "llguidance"
        elif server_args.grammar_backend == "xgrammar":
            raise ValueError(
                "--grammar-backend xgrammar: SGLang runs it on GPUs only; leave it out or use "
                "llguidance"
            )
        # An idle scheduler polls; on a GPU host that costs a spare core, here it costs the model.
        server_args.sleep_on_idle = True
        # Before it ends a server whose scheduler has gone, SGLang sleeps for five seconds, for a
        # GPU to settle, and looks for one to dump; all clients wait meanwhile.
        for name in _DUMPS:
            os.environ.setdefault(name, "false")
        for name, kept in ONEDNN_KEEPS.items():
            os.environ.setdefault(name, kept)

    def get_default_attention_backend(self) -> str:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        # Our plugin registers it: SGLANG_PLUGINS may leave that out and keep the platform.
        stock = EllmConfig.from_env() is None and CPU_BACKEND in ATTENTION_BACKENDS
        return CPU_BACKEND if stock and load().library is not None else ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type[Any]:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type[Any]:
        from ellm_sgl.sglang.platform.allocator import CpuPagedAllocator

        return CpuPagedAllocator
