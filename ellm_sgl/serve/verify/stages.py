"""The settings that are compared with stock SGLang, grouped by the server that they run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ellm_sgl.config import ELLM, HCACHE, RECOMPUTE
from ellm_sgl.latency import ModelShape
from ellm_sgl.serve.verify.rounding import EXACT
from ellm_sgl.serve.verify.setting import (
    ABORTS,
    CHATS,
    RESIZED,
    Setting,
    Sizes,
    Stage,
    cores_of_two_ranks,
    why_not_two_ranks,
)
from ellm_sgl.sglang import cuda

RATIOS = (0.0, 0.25, 0.5, 0.9)
LEAST_RATIO = min(r for r in RATIOS if r)
FORCED = "forced eviction"
HOST_RATIO = 0.75
SPLITS = ((1, 0), (3, 1), (2, 1), (3, 2), (1, 1), (2, 2), (1, 2))
"""(l1, l2): layers fetched from the host to layers recomputed."""
HIDDEN_SPLITS = ((1, 0), (3, 1))
UNFUSED_SPLITS = ((1, 1), (0, 1))
QUICK_SPLITS = ((0, 1), (1, 1), (1, 0))
"""All recomputed, half of each, all fetched."""
POOL_TOKENS = 16_384
EAGER = ("--schedule-conservativeness", "0.05")
"""SGLang admits with hardly a thought of outputs, so that requests get in each other's way."""
ROTATING = ("fcfs", {"rotate": True})
"""Requests rotate on the device: their KV leaves it as a whole and is fetched ahead,"""
NO_HURRY = ("--ellm-tpot-slo-ms", "60000")
"""with an SLO so far off that time decides nothing."""
FULL = ("fixed-ratio", {"ratio": 0.0})
"""All that fits is cached, and nobody is paused by choice."""
MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "64")
STORED, FROM_STORE = "chats, stored", "chats, from the store"
ONLY_ON_CPU = "hidden states on the host, passes of their own (unfused), a store on disk"
TWO_RANKS = "chats, two ranks"
TWO_RANKS_RESIZED = "chats, two ranks, resized"
RESTORED = ("evicted_units", "fetched_units")
RESIZES = 20
"""Random ones, where a setting is for them."""


def stages(dtype: str, mode: str, quick: bool, sizes: Sizes) -> Iterator[Stage]:
    """The servers to start, in their order, and what to ask of each."""
    if mode != ELLM:
        yield from _baseline(mode, sizes)
        return
    ample = 2 * POOL_TOKENS
    host: tuple[str, ...] = ("--ellm-host-kv-tokens", str(POOL_TOKENS))
    half = str(-(-sizes.model.layers // 2))
    group = ("--ellm-layer-group", str(sizes.layer_group))
    on_cpu = not cuda.available()
    if quick:
        kind, keeps = ("mixed", half) if on_cpu else ("host", "kv")
        mixed = _splits(kind, QUICK_SPLITS)
        # With few groups fetching gains no memory: then it recomputes.
        needs = ("evicted_units", "recomputed_tokens")
        mixed += (_forced(f"{kind}, {FORCED}", sizes.small, needs),)
        yield _fixed_ratio(mixed, ample, *group, *host, "--ellm-host-keeps", keeps)
    else:
        recomputed = tuple(_ratio(r) for r in RATIOS)
        forced = _forced(FORCED, sizes.small, ("evicted_units", "recomputed_tokens"))
        yield _fixed_ratio((*recomputed, forced), ample, *group)
        # Each split gives other layers only where a group is one layer.
        host = ("--ellm-layer-group", "1", *host)
        beside = ample + sizes.hidden_as_kv_tokens(POOL_TOKENS)
        on_device = ("--ellm-host-keeps", half, "--ellm-hidden-on", "device")
        tiers = (
            ("host", ("--ellm-host-keeps", "kv"), ample, SPLITS),
            ("hidden", ("--ellm-host-keeps", "hidden"), ample, HIDDEN_SPLITS),
            ("mixed", on_device, beside, HIDDEN_SPLITS),
            ("unfused", ("--ellm-fusion", "off"), ample, UNFUSED_SPLITS),
        )
        for name, more, tokens, splits in tiers if on_cpu else tiers[:1]:
            tried = splits if dtype == EXACT else splits[:1]
            settings = _splits(name, tried)
            needs = ("evicted_units", "fetched_units")
            settings += (_forced(f"{name}, {FORCED}", sizes.small, needs),)
            yield _fixed_ratio(settings, tokens, *host, *more)
    yield from _crowded(dtype, quick, sizes)


def _ratio(ratio: float) -> Setting:
    needs = ("recomputed_tokens",) if ratio else ()
    return Setting(f"r = {ratio}", needs, policy=("fixed-ratio", {"ratio": ratio}))


def _splits(name: str, splits: Sequence[tuple[int, int]]) -> tuple[Setting, ...]:
    """`splits` with a host tier."""
    settings = []
    for l1, l2 in splits:
        policy = {"ratio": HOST_RATIO, "layers": (l1, l2)}
        needs = ("fetched_units",) * (l1 > 0) + ("recomputed_tokens",) * (l2 > 0)
        # Hidden states are the lowest layers', which are recomputed rather than fetched.
        if l1 > 0 and (name == "hidden" or (name == "mixed" and l1 > l2)):
            needs += ("projected_units",)
        settings.append(Setting(f"{name} {l1}:{l2}", needs, policy=("fixed-ratio", policy)))
    return tuple(settings)


def _forced(name: str, small: int, needs: tuple[str, ...]) -> Setting:
    """A device so small that blocks are evicted, whatever the policy wants."""
    return Setting(name, needs, policy=("fixed-ratio", {}), device_tokens=small)


def _fixed_ratio(settings: tuple[Setting, ...], device_tokens: int, *arguments: str) -> Stage:
    common = ("--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", str(device_tokens))
    return Stage((*common, *arguments), settings)


def _crowded(dtype: str, quick: bool, sizes: Sizes) -> Iterator[Stage]:
    """Settings in which requests that share a prefix get in each other's way: the device holds a
    part of them, beside a host tier, and some pause while others run. In fp32 all of them, of which
    `quick` leaves one; in 16 bits those on one rank without mixed chunks, and none if `quick`."""
    device, host = sizes.crowded(CHATS), sizes.load_tokens[CHATS]
    memory = ("--ellm-device-kv-tokens", str(device), "--ellm-host-kv-tokens", str(host))
    arguments = ("--ellm-policy", "fcfs", "--ellm-layer-group", "1", *NO_HURRY, *memory)
    swing = (device, sizes.tight)

    def paused(name: str) -> Setting:
        # While the pool is tight, blocks that several requests share are evicted as well; when it
        # is not, those who are paused get them back.
        return Setting(name, (*RESTORED, "pauses"), CHATS, ROTATING, swing=swing)

    if quick:
        if dtype == EXACT:
            yield Stage(arguments, (paused("chats, paused"),))
        return
    by_default = Setting("chats, fcfs", RESTORED, CHATS, ("fcfs", {}), swing=swing)
    small = min(sizes.crowded(ABORTS), device)
    aborts = Setting("aborts, paused", (*RESTORED, "pauses", "aborted"), ABORTS, ROTATING, small)
    resized = Setting("chats, resized", (*RESTORED, *RESIZED), CHATS, ("fcfs", {}), resizes=RESIZES)
    yield Stage(arguments, (paused("chats, paused"), by_default, resized, aborts))
    if not cuda.available():
        yield _stored(sizes, arguments)
    if dtype != EXACT:
        return
    # Where all that run fit, a fixed ratio of 0 evicts only what a smaller pool leaves no room for.
    full = Setting("chats, mixed chunk, full", RESTORED, CHATS, FULL, swing=swing)
    yield Stage((*arguments, *MIXED_CHUNK), (paused("chats, mixed chunk"), full))
    if why_not_two_ranks(sizes.model) is None:  # else `left_out` tells
        ranks = (paused(TWO_RANKS), replace(resized, name=TWO_RANKS_RESIZED))
        yield Stage((*arguments, "--tp", "2"), ranks, cores_of_two_ranks())


def _stored(sizes: Sizes, arguments: tuple[str, ...]) -> Stage:
    """A server that writes to a store on disk, and one that begins with what the first has left."""
    most = sizes.model.in_elements_of(4).kv_bytes_per_token
    room = 2 * most * sizes.load_tokens[CHATS]
    settings = (
        Setting(STORED, RESTORED, CHATS),
        Setting(FROM_STORE, ("stored_tokens",), CHATS),
    )
    return Stage((*arguments, "--ellm-kv-store-size", str(room)), settings, store=True)


def _baseline(mode: str, sizes: Sizes) -> Iterator[Stage]:
    """A baseline on a device that holds the longest request and little more; where it has a host
    tier, with one that holds all, and with one that is soon full."""
    tier = ("--ellm-layer-group", "1", "--ellm-host-kv-tokens")
    large, full = (*tier, str(POOL_TOKENS)), (*tier, "256")
    away = ("pauses", "fetched_units")
    servers: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        (mode, away, large),
        (f"{mode}, host full", away, full),
    ]
    if mode == RECOMPUTE:
        servers = [(mode, ("retractions",), ())]
    if mode == HCACHE:  # its partition, and hidden states of all layers
        hidden = (*large, "--ellm-host-keeps", "hidden")
        servers.append((f"{mode}, hidden", (*away, "projected_units"), hidden))
    device = str(sizes.longest + sizes.output_tokens + 64)
    for name, needs, host in servers:
        common = ("--ellm-mode", mode, *EAGER, "--ellm-device-kv-tokens", device)
        yield Stage((*common, *host), (Setting(name, needs),))


def left_out(mode: str, quick: bool, dtypes: Sequence[str], model: ModelShape) -> Iterator[str]:
    """Settings that this model or machine cannot run, each with the reason."""
    if mode == ELLM and not quick and EXACT in dtypes and (why := why_not_two_ranks(model)):
        yield f"{TWO_RANKS}: {why}"
    if mode == ELLM and cuda.available():
        yield f"{ONLY_ON_CPU}: on CPU hosts only so far"
