"""How much memory the tensors of a step take at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes that tensors made while `step` runs take at once, on a CPU host.

    PyTorch's profiler sees every allocation of its CPU allocator. It does not see what C++ kernels
    and oneDNN keep for themselves, nor what libc keeps of memory that has been freed.
    """
    # Of memory alone. This profiler, unlike its successor, writes no log.
    only_memory = False, True, False, False, False
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *only_memory, _ExperimentalConfig()))
    try:
        step()
    finally:
        events = _disable_profiler_legacy()
    changes = [
        event.cpu_memory_usage()
        for thread in events
        for event in thread
        if str(event.kind()) == "memory_alloc"
    ]
    return max(itertools.accumulate(changes), default=0)
