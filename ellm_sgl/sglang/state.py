"""eLLM's state, reported and adjusted through SGLang's own channel between processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ellm_sgl.kv import IntegrityError
from ellm_sgl.policies import FixedRatio
from ellm_sgl.sglang import runtime

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.managers.scheduler import Scheduler

RATIO = "ellm_ratio"
DEVICE_TOKENS = "ellm_device_kv_tokens"


def report(result: Any, scheduler: Scheduler, *_: Any) -> Any:
    """After `Scheduler.get_internal_state`: add the entry "ellm"."""
    result.internal_state["ellm"] = describe(scheduler)
    return result


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """What `GET /ellm/state` answers."""
    ours = runtime.current()
    statistics = ours.table.statistics()
    totals = ours.elastic.totals
    lengths = [
        (ours.table.length_of(s), ours.table.uncached_tokens(s)) for s in ours.table.sequence_ids
    ]
    cached = [1 - uncached / length for length, uncached in lengths]
    return {
        "enabled": True,
        "policy": ours.config.policy,
        "layer_group": ours.table.shape.layer_group,
        "block_tokens": ours.table.shape.block_tokens,
        "device_units_total": statistics.units_total,
        "device_units_free": statistics.units_free,
        "running": len(scheduler.running_batch.reqs),
        "waiting": len(scheduler.waiting_queue),
        "cached_ratio_mean": sum(cached) / len(cached) if cached else 1.0,
        "uncached_tokens": statistics.uncached_tokens,
        "recomputed_tokens_total": totals.recomputed_tokens,
        "evicted_units_total": totals.evicted_units,
        "restored_units_total": totals.restored_units,
        "retractions_total": totals.retractions,
        "integrity": _integrity(),
        "pool": dataclasses.asdict(statistics),
    }


def _integrity() -> str:
    try:
        runtime.current().table.check_integrity()
    except IntegrityError as error:
        return str(error)
    return "ok"


def adjust(original: Callable[..., Any], scheduler: Scheduler, request: SetInternalStateReq) -> Any:
    """Around `Scheduler.set_internal_state`: take our keys, leave SGLang the others.

    `ellm_ratio`: a new target for the fixed-ratio policy. `ellm_device_kv_tokens`: use only so
    much of the device pool from now on.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    theirs = {k: v for k, v in request.server_args.items() if k not in (RATIO, DEVICE_TOKENS)}
    try:
        apply = _prepare(request.server_args)
    except ValueError:
        return SetInternalStateReqOutput(updated=False)
    if theirs:
        request.server_args = theirs
        result = original(scheduler, request)
        if not result.updated:
            return result
    apply()
    return SetInternalStateReqOutput(updated=True)


def _prepare(values: dict[str, Any]) -> Callable[[], None]:
    """Check all values, and return what applies them.

    Raises:
        ValueError: one of them makes no sense; none is applied.
    """
    ours = runtime.current()
    policy = FixedRatio(float(values[RATIO])) if RATIO in values else ours.elastic.policy
    limit = ours.table.unit_limit
    if DEVICE_TOKENS in values:
        shape = ours.table.shape
        limit = int(values[DEVICE_TOKENS]) // shape.block_tokens * shape.num_groups
        ours.table.check_unit_limit(limit)

    def apply() -> None:
        ours.elastic.policy = policy
        ours.table.limit_units(limit)

    return apply
