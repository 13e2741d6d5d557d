"""Generated states for tests, the conformance kit and `ellm-sgl policies bench`.

`requests` and `make_state` build the state one asks for, with usual values for what is left out;
`random_state` draws one, from trivial to hopeless: unequal lengths, shared prefixes, priorities,
SLOs, memory from four times the need to a sixteenth of it, several models, machines and latency
models. Every state is possible: what is resident fits into the memory that the state has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ellm_sgl.latency import (
    HardwareProfile,
    LatencyModel,
    ModelShape,
    PaperLatencyModel,
    RooflineLatencyModel,
)
from ellm_sgl.policies.base import (
    NO_GROWTH,
    Growth,
    IntArray,
    MemoryState,
    Requests,
    StepReport,
    SystemState,
)
from ellm_sgl.policies.lengths import OutputLengths
from ellm_sgl.policies.planned import latency_seen

LONGEST = 32_768
"""Tokens of the longest generated request."""

SHAPES = {
    "tiny": ModelShape(
        layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=768,
        vocabulary=4096, weight_bytes=4, kv_bytes=4,
    ),
    "llama2-7b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008,
        vocabulary=32000,
    ),
    "llama3-70b-tp4": ModelShape(
        layers=80, hidden=8192, heads=16, kv_heads=2, head_dim=128, intermediate=7168,
        vocabulary=32064,
    ),
    "mixtral-8x7b-tp2": ModelShape(
        layers=32, hidden=4096, heads=16, kv_heads=4, head_dim=128, intermediate=7168,
        vocabulary=16000, experts=8, experts_per_token=2,
    ),
}  # fmt: skip
"""Models to generate states for; with -tpN, what one of N ranks holds."""

PROFILES = {
    "cpu": HardwareProfile(
        name="cpu", flops=1.2e11, device_bytes_per_s=1.5e10, link_bytes_per_s=6e9,
        link_latency_s=2e-6, step_overhead_s=5e-3, row_overhead_s=1e-4, attention_flops=4e10,
    ),
    "l4": HardwareProfile(
        name="l4", flops=8e13, device_bytes_per_s=2.5e11, link_bytes_per_s=2.2e10,
        link_latency_s=1e-5, step_overhead_s=1e-3, row_overhead_s=5e-6, attention_flops=5e13,
    ),
    "h100": HardwareProfile(
        name="h100", flops=6.5e14, device_bytes_per_s=2.8e12, link_bytes_per_s=5e10,
        link_latency_s=1e-5, step_overhead_s=8e-4, row_overhead_s=4e-6, attention_flops=4e14,
    ),
}  # fmt: skip
"""Machines to generate states for; round figures, not measurements."""


def requests(
    tokens: npt.ArrayLike,
    *,
    request_id: npt.ArrayLike | None = None,
    prompt_tokens: npt.ArrayLike | None = None,
    max_new_tokens: npt.ArrayLike = 1024,
    shared_tokens: npt.ArrayLike = 0,
    uncached_tokens: npt.ArrayLike = 0,
    uncached_on_host: npt.ArrayLike = 0,
    arrival_s: npt.ArrayLike = 0.0,
    waited_s: npt.ArrayLike = 0.0,
    priority: npt.ArrayLike = 0,
    tpot_slo_s: npt.ArrayLike = np.inf,
    ttft_slo_s: npt.ArrayLike = np.inf,
    tpot_s: npt.ArrayLike = np.nan,
) -> Requests:
    """Requests of the given lengths. A single number stands for every request's.

    Args:
        tokens: s_i, one per request.
        request_id: 0, 1, 2, ... unless given.
        prompt_tokens: all of `tokens` unless given.
        max_new_tokens, ...: the columns of `Requests`.
    """
    lengths = np.asarray(tokens, np.int64)
    count = len(lengths)

    def whole(values: npt.ArrayLike) -> IntArray:
        return _read_only(np.broadcast_to(np.asarray(values, np.int64), count))

    def real(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return _read_only(np.broadcast_to(np.asarray(values, np.float64), count))

    return Requests(
        request_id=whole(np.arange(count) if request_id is None else request_id),
        tokens=whole(lengths),
        prompt_tokens=whole(lengths if prompt_tokens is None else prompt_tokens),
        max_new_tokens=whole(max_new_tokens),
        shared_tokens=whole(shared_tokens),
        uncached_tokens=whole(uncached_tokens),
        uncached_on_host=whole(uncached_on_host),
        arrival_s=real(arrival_s),
        waited_s=real(waited_s),
        priority=whole(priority),
        tpot_slo_s=real(tpot_slo_s),
        ttft_slo_s=real(ttft_slo_s),
        tpot_s=real(tpot_s),
    )


def make_state(
    running: Requests,
    waiting: Requests | None = None,
    *,
    prefilling: Requests | None = None,
    device_tokens: int,
    device_free_tokens: int | None = None,
    block_tokens: int = 16,
    host_tokens: int = 0,
    max_restored_tokens: int = LONGEST,
    staging_overhead: float = 0.0,
    growth: Growth = NO_GROWTH,
    max_running: int = 256,
    model: ModelShape = SHAPES["llama2-7b"],
    hardware: HardwareProfile = PROFILES["h100"],
    latency: LatencyModel | None = None,
    tpot_slo_s: float = np.inf,
    now_s: float = 1000.0,
    last_step: StepReport | None = None,
    pace: float = 1.0,
    lengths: OutputLengths | None = None,
) -> SystemState:
    """A state of these requests.

    Args:
        device_free_tokens: unless given, what the resident blocks of `running` leave of
            `device_tokens`; blocks that several requests share are counted once, as if all
            shared one prefix.
        latency: a `RooflineLatencyModel` of `model` on `hardware` unless given; with a host tier,
            one that fetches what the host has.
        lengths: nothing is known of output lengths unless given.
        running, waiting, ...: the fields of `SystemState` and `MemoryState`.
    """
    if device_free_tokens is None:
        device_free_tokens = max(0, device_tokens - resident_tokens(running, block_tokens))
    memory = MemoryState(
        block_tokens=block_tokens,
        device_tokens=device_tokens,
        device_free_tokens=device_free_tokens,
        host_tokens=host_tokens,
        host_free_tokens=max(0, host_tokens - int(running.uncached_on_host.sum())),
        max_restored_tokens=max_restored_tokens,
        staging_overhead=staging_overhead,
        growth=growth,
    )
    if latency is None:
        latency = latency_seen(RooflineLatencyModel(model, hardware), running, memory)
    return SystemState(
        now_s=now_s,
        busy_s=now_s,
        running=running,
        waiting=requests([]) if waiting is None else waiting,
        prefilling=requests([]) if prefilling is None else prefilling,
        max_running=max_running,
        memory=memory,
        model=model,
        hardware=hardware,
        latency=latency,
        tpot_slo_s=tpot_slo_s,
        last_step=last_step,
        pace=pace,
        lengths=OutputLengths.nothing() if lengths is None else lengths,
    )


def resident_tokens(requests: Requests, block_tokens: int) -> int:
    """Device tokens, in whole blocks, that these requests hold, a shared prefix counted once."""
    if len(requests) == 0:
        return 0
    blocks = -(-requests.tokens // block_tokens)
    missing = -(-requests.uncached_tokens // block_tokens)
    shared = requests.shared_tokens // block_tokens
    return int((np.maximum(blocks - missing - shared, 0).sum() + shared.max()) * block_tokens)


@dataclass(frozen=True)
class Size:
    """Bounds of a generated state."""

    running: int = 256
    """Most running requests."""
    waiting: int = 1024
    """Most waiting requests."""
    longest: int = LONGEST
    """Most tokens of a request."""


def random_state(
    rng: np.random.Generator, size: Size | None = None, *, exact_size: bool = False
) -> SystemState:
    """A state drawn at random; equal for equal states of `rng`.

    Args:
        size: bounds; `Size()` unless given.
        exact_size: as many running and waiting requests as the bounds allow.
    """
    size = size or Size()
    count_running, count_waiting = size.running, size.waiting
    if not exact_size:
        count_running = int(rng.integers(0, size.running + 1))
        count_waiting = int(rng.integers(0, size.waiting + 1))
    block_tokens = int(rng.choice([1, 8, 16, 32]))
    count = count_running + count_waiting

    prompt = _lengths(rng, count, size.longest)
    max_new = np.maximum(1, (rng.lognormal(5.5, 1.0, count)).astype(np.int64))
    generated = (rng.random(count) * max_new).astype(np.int64)
    generated[count_running:] = 0
    tokens = np.minimum(prompt + generated, size.longest)
    shared = _shared_tokens(rng, tokens, count_running, block_tokens)
    evictable = np.maximum((tokens - 1) // block_tokens - shared // block_tokens, 0)
    uncached, device_tokens = _memory(
        rng, tokens[:count_running], shared[:count_running], evictable[:count_running],
        int(tokens.sum()), block_tokens,
    )  # fmt: skip

    model = SHAPES[str(rng.choice(sorted(SHAPES)))]
    hardware = PROFILES[str(rng.choice(sorted(PROFILES)))]
    paper = bool(rng.integers(2))
    latency = (PaperLatencyModel if paper else RooflineLatencyModel)(model, hardware)

    now_s = 1000.0
    prefilling = _prefilling(size.longest, now_s, device_tokens)
    columns = {
        "request_id": np.arange(count),
        "prompt_tokens": np.minimum(prompt, tokens),
        "max_new_tokens": max_new,
        "shared_tokens": shared,
        "uncached_tokens": np.append(uncached, np.zeros(count_waiting, np.int64)),
        "arrival_s": np.sort(now_s - rng.exponential(30.0, count)),
        "waited_s": np.append(rng.exponential(0.02, count_running), np.zeros(count_waiting)),
        "priority": rng.integers(-2, 3, count) * int(rng.integers(2)),
        "tpot_slo_s": _some(rng, rng.uniform(0.05, 1.0, count)),
        "ttft_slo_s": _some(rng, rng.uniform(0.5, 20.0, count)),
        "tpot_s": np.where(generated > 1, rng.uniform(0.01, 0.2, count), np.nan),
    }
    columns["waited_s"][count_running:] = now_s - columns["arrival_s"][count_running:]

    def part(rows: slice) -> Requests:
        return requests(tokens[rows], **{name: c[rows] for name, c in columns.items()})

    state = make_state(
        part(slice(0, count_running)),
        part(slice(count_running, count)),
        prefilling=prefilling,
        device_tokens=device_tokens,
        block_tokens=block_tokens,
        host_tokens=int(rng.integers(2)) * device_tokens,
        growth=_growth(device_tokens, now_s),
        max_restored_tokens=max(int(uncached.sum()), int(rng.choice([1024, 8192, LONGEST]))),
        staging_overhead=float(rng.choice([0.0, 0.1, 0.4])),
        max_running=max(1, count_running + len(prefilling), int(rng.integers(1, count + 2))),
        model=model,
        hardware=hardware,
        latency=latency,
        tpot_slo_s=float(rng.choice([np.inf, 0.05, 0.2, 1.0])),
        now_s=now_s,
    )
    return _some_on_host(rng, state) if state.memory.host_tokens else state


def _growth(device_tokens: int, seed: float) -> Growth:
    """None in half of the states. Draws from a generator of its own: the rest of a state is as it
    was before there was growth."""
    own = np.random.default_rng(int(1e6 * seed))
    if own.random() < 0.5:
        return NO_GROWTH
    most = int(own.integers(0, 3 * device_tokens + 1))
    return Growth(int(own.integers(0, most + 1)), most, float(own.choice([0.0, 1e-7, 1e-4])))


def _prefilling(longest: int, now_s: float, seed: int) -> Requests:
    """Of half of the states nobody. Draws from a generator of its own, as `_growth` does."""
    own = np.random.default_rng(seed)
    tokens = own.integers(1, longest + 1, int(own.integers(2)))
    return requests(tokens, request_id=-1, arrival_s=now_s - 1.0, waited_s=1.0)


def _some_on_host(rng: np.random.Generator, state: SystemState) -> SystemState:
    """With so much of what the running requests miss on the host, as far as it fits there."""
    uncached, block = state.running.uncached_tokens, state.memory.block_tokens
    fits = min(1.0, state.memory.host_tokens / max(1, int(uncached.sum())))
    share = fits * float(rng.choice([0.0, 0.5, 1.0]))
    on_host = _read_only((share * uncached / block).astype(np.int64) * block)
    running = replace(state.running, uncached_on_host=on_host)
    free = state.memory.host_tokens - int(on_host.sum())
    memory = replace(state.memory, host_free_tokens=free)
    latency = latency_seen(state.latency, running, memory)
    return replace(state, running=running, memory=memory, latency=latency)


def _lengths(rng: np.random.Generator, count: int, longest: int) -> IntArray:
    """Prompt lengths: log-normal about a median of the state's own; sometimes all equal."""
    median = float(np.exp(rng.uniform(np.log(8), np.log(2048))))
    spread = float(rng.choice([0.0, 0.5, 1.2]))
    lengths = median * rng.lognormal(0.0, spread, count)
    return lengths.clip(1, longest).astype(np.int64)


def _shared_tokens(
    rng: np.random.Generator, tokens: IntArray, running: int, block_tokens: int
) -> IntArray:
    """One prefix that some requests begin with, in whole blocks; 0 for all in half the states.

    A prefix is shared if a running request beside the one in question uses it.
    """
    share = float(rng.choice([0.0, 0.0, 0.5, 0.9]))
    prefix = int(np.exp(rng.uniform(np.log(8), np.log(1024)))) // block_tokens * block_tokens
    uses = (rng.random(len(tokens)) < share) & (tokens > prefix)
    users = int(uses[:running].sum())
    uses[:running] &= users > 1
    uses[running:] &= users > 0
    return np.where(uses, prefix, 0)


def _memory(
    rng: np.random.Generator,
    tokens: IntArray,
    shared: IntArray,
    evictable: IntArray,
    need: int,
    block_tokens: int,
) -> tuple[IntArray, int]:
    """Uncached tokens of each running request, and device tokens: log-uniform between a
    sixteenth of `need` and four times that; more if what cannot be evicted is more."""
    prefix = int(shared.max(initial=0)) // block_tokens
    held = -(-tokens // block_tokens) - shared // block_tokens
    device = int(need * np.exp(rng.uniform(np.log(1 / 16), np.log(4)))) // block_tokens
    device = max(device, int((held - evictable).sum()) + prefix + 1)
    short = int(held.sum()) + prefix - device
    share = max(0.0, short / max(1, int(evictable.sum())))
    missing = np.minimum(np.ceil(share * evictable), evictable).astype(np.int64)
    return missing * block_tokens, device * block_tokens


def _some(rng: np.random.Generator, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """These values for a share of the requests that differs by state, inf for the others."""
    return np.where(rng.random(len(values)) < rng.choice([0.0, 0.3, 1.0]), values, np.inf)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.array(array)
    array.setflags(write=False)
    return array
