"""eLLM's state, reported and adjusted through SGLang's own channel between processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ellm_sgl.config import RECOMPUTE, ConfigError
from ellm_sgl.kv import IntegrityError
from ellm_sgl.latency import PaperLatencyModel
from ellm_sgl.policies.registry import create
from ellm_sgl.sglang import runtime
from ellm_sgl.sglang.http import CONTROL
from ellm_sgl.sglang.starting import switch_policy

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
        "mode": ours.config.mode,
        "policy": _policy(),
        "hardware": None if ours.hardware is None else dataclasses.asdict(ours.hardware),
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
        "host_units_total": statistics.host_units_total,
        "host_units_free": statistics.host_units_free,
        "saved_units_total": totals.saved_units,
        "fetched_units_total": totals.fetched_units,
        "fetched_ahead_units_total": totals.fetched_ahead_units,
        "borrowed_units_total": totals.borrowed_units,
        "projected_units_total": totals.projected_units,
        "swap_stall_ms_total": totals.swap_stall_s * 1e3,
        "restored_units_total": totals.restored_units,
        "steps_total": 0 if ours.deciding is None else ours.deciding.loop.steps.steps,
        "retractions_total": totals.retractions,
        "sat_out_total": totals.sat_out,
        "page_table_ms_total": totals.page_table_s * 1e3,
        "integrity": _integrity_of_all(scheduler),
        "pool": dataclasses.asdict(statistics),
    }


def _policy() -> dict[str, Any]:
    """The policy in force, and how often its answer had to be replaced."""
    ours = runtime.current()
    if ours.deciding is None:
        return {"name": ours.policy_name}
    safe = ours.deciding.loop.safe
    return {
        "name": ours.policy_name,
        "budget_ms": safe.budget_s * 1e3,
        "decisions": safe.asked,
        "fallbacks": dict(safe.failures),
    }


def _steps() -> list[dict[str, Any]]:
    """The last measured steps: work, time, and what each latency model said of them."""
    ours = runtime.current()
    if ours.deciding is None or ours.hardware is None:
        return []
    loop = ours.deciding.loop
    paper = PaperLatencyModel(loop.limits.model, ours.hardware)
    return [
        {
            **{name: float(value) for name, value in vars(step.work).items()},
            "seconds": step.seconds,
            "predicted_s": step.predicted_s,
            "paper_s": float(paper.step_seconds(step.work)),
            "swap_stall_s": step.swap_stall_s,
        }
        for step in loop.steps.reports
    ]


def _integrity() -> str:
    try:
        runtime.current().table.check_integrity()
    except IntegrityError as error:
        return str(error)
    return "ok"


def _integrity_of_all(scheduler: Scheduler) -> str:
    """Of this rank's page table and, with tensor parallelism, of the others'. These must not only
    be consistent but alike: each rank holds its heads of the same blocks. All ranks answer a
    request for the state, so all get here."""
    mine = (_integrity(), dataclasses.asdict(runtime.current().table.statistics()))
    count = scheduler.ps.tp_size
    if count == 1:
        return mine[0]
    ranks: list[Any] = [None] * count
    torch.distributed.all_gather_object(ranks, mine, group=scheduler.tp_group.cpu_group)
    for rank, (integrity, statistics) in enumerate(ranks):
        if integrity != "ok":
            return f"rank {rank}: {integrity}"
        if statistics != ranks[0][1]:
            return f"rank {rank} has {statistics}, rank 0 has {ranks[0][1]}"
    return "ok"


def control(original: Callable[..., Any], scheduler: Scheduler, request: Any) -> Any:
    """Around `Scheduler.handle_dumper_control`, the one request between SGLang's HTTP process
    and its scheduler that carries a name and a JSON body, and brings JSON back."""
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    if not request.method.startswith(CONTROL):
        return original(scheduler, request)
    try:
        response = _CONTROLS[request.method.removeprefix(CONTROL)](request.body)
        answer = DumperControlReqOutput(success=True, response=response)
    except ConfigError as error:
        answer = DumperControlReqOutput(success=False, response=[], error=str(error))
    return scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def _refuse_in_a_baseline(what: str) -> None:
    """Raise ConfigError where the mode decides by itself."""
    config = runtime.current().config
    if config.is_baseline:
        raise ConfigError(
            f"{what} cannot be changed: the server runs in mode {config.mode}, which decides by "
            "itself"
        )


def _switch(body: dict[str, Any]) -> list[dict[str, Any]]:
    _refuse_in_a_baseline("the policy")
    policy = create(body["name"], body["options"])
    switch_policy(body["name"], policy)
    return []


_CONTROLS: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "steps": lambda _: _steps(),
    "policy": _switch,
}


def adjust(original: Callable[..., Any], scheduler: Scheduler, request: SetInternalStateReq) -> Any:
    """Around `Scheduler.set_internal_state`: take our keys, leave SGLang the others.

    `ellm_ratio`: the fixed-ratio policy with this ratio. `ellm_device_kv_tokens`: use only so
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
    if RATIO in values:
        _refuse_in_a_baseline(RATIO)
    if DEVICE_TOKENS in values and ours.config.mode == RECOMPUTE:
        raise ConfigError(f"{DEVICE_TOKENS}: mode {RECOMPUTE} leaves memory to SGLang")
    options = {"ratio": float(values[RATIO])} if RATIO in values else {}
    policy = create("fixed-ratio", options) if options else None
    limit = ours.table.unit_limit
    if DEVICE_TOKENS in values:
        shape = ours.table.shape
        limit = int(values[DEVICE_TOKENS]) // shape.block_tokens * shape.num_groups
        ours.table.check_unit_limit(limit)

    def apply() -> None:
        if policy is not None:
            switch_policy("fixed-ratio", policy)
        ours.table.limit_units(limit)

    return apply
