"""Settings in which requests that share a prefix get in each other's way: the device holds a part
of them, beside a host tier, and some pause while others run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ellm_sgl.config import ELLM
from ellm_sgl.serve.verify.model import ModelShape, cores_of_two_ranks
from ellm_sgl.serve.verify.rounding import EXACT
from ellm_sgl.serve.verify.setting import ABORTS, CHATS, Setting, Sizes, Stage

TURNS = ("fcfs", {"rotate": True})
"""Requests take turns on the device: their KV leaves it as a whole and is fetched ahead,"""
NO_HURRY = ("--ellm-tpot-slo-ms", "60000")
"""with an SLO so far off that time decides nothing."""
FULL = ("fixed-ratio", {"ratio": 0.0})
"""All that fits is cached, and nobody is paused by choice."""
MIXED_CHUNK = ("--enable-mixed-chunk", "--chunked-prefill-size", "64")
TWO_RANKS = "chats, two ranks"
RESTORED = ("evicted_units", "fetched_units")


def crowded_stages(dtype: str, quick: bool, sizes: Sizes) -> Iterator[Stage]:
    """In fp32 all of them, of which `quick` leaves one; in 16 bits those on one rank without mixed
    chunks, and none if `quick`."""
    device, host = sizes.crowded(CHATS), sizes.load_tokens[CHATS]
    memory = ("--ellm-device-kv-tokens", str(device), "--ellm-host-kv-tokens", str(host))
    arguments = ("--ellm-policy", "fcfs", "--ellm-layer-group", "1", *NO_HURRY, *memory)
    swing = (device, sizes.tight)

    def paused(name: str) -> Setting:
        # While the pool is tight, blocks that several requests share are evicted as well; when it
        # is not, those who are paused get them back.
        return Setting(name, (*RESTORED, "pauses"), CHATS, TURNS, swing=swing)

    if quick:
        if dtype == EXACT:
            yield Stage(arguments, (paused("chats, paused"),))
        return
    by_default = Setting("chats, fcfs", RESTORED, CHATS, ("fcfs", {}), swing=swing)
    small = min(sizes.crowded(ABORTS), device)
    aborts = Setting("aborts, paused", (*RESTORED, "pauses", "aborted"), ABORTS, TURNS, small)
    yield Stage(arguments, (paused("chats, paused"), by_default, aborts))
    if dtype != EXACT:
        return
    # Where all that run fit, a fixed ratio of 0 evicts only what a smaller pool leaves no room for.
    full = Setting("chats, mixed chunk, full", RESTORED, CHATS, FULL, swing=swing)
    yield Stage((*arguments, *MIXED_CHUNK), (paused("chats, mixed chunk"), full))
    if sizes.model.why_not_two_ranks() is None:  # else `left_out` tells
        ranks = (paused(TWO_RANKS),)
        yield Stage((*arguments, "--tp", "2"), ranks, cores_of_two_ranks())


def left_out(mode: str, quick: bool, dtypes: Sequence[str], model: ModelShape) -> Iterator[str]:
    """Settings that this model or machine cannot run, each with the reason."""
    if mode == ELLM and not quick and EXACT in dtypes and (why := model.why_not_two_ranks()):
        yield f"{TWO_RANKS}: {why}"
