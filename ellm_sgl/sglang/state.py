"""eLLM's state, reported and adjusted through SGLang's own channel between processes.

All of this runs on the scheduler's thread, between two steps: what is asked for often is cheap, and
what takes longer (`integrity`) is done only when it is asked for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ellm_sgl.config import RECOMPUTE, ConfigError
from ellm_sgl.config.ranges import SHARE, Range, shown
from ellm_sgl.engine.policy_guard import FIRST_ANSWER_S
from ellm_sgl.latency import PaperLatencyModel
from ellm_sgl.memory import IntegrityError, PageTable
from ellm_sgl.policies import Policy
from ellm_sgl.policies.registry import create
from ellm_sgl.sglang.context import Context, context_of
from ellm_sgl.sglang.ranks import of_rank_0, own_randomness
from ellm_sgl.sglang.replicas import CONTROL, REPLICA
from ellm_sgl.sglang.request_views import describe_requests
from ellm_sgl.sglang.scheduler import scheduler_of
from ellm_sgl.sglang.start import switch_policy
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

RATIO = "ellm_ratio"
DEVICE_TOKENS = "ellm_device_kv_tokens"


def report(result: Any, scheduler: Scheduler, *_: Any) -> Any:
    """After `Scheduler.get_internal_state`: add the entry "ellm"."""
    result.internal_state["ellm"] = describe(scheduler)
    return result


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """What `GET /ellm/state` answers."""
    ours = context_of(scheduler)
    statistics = ours.table.statistics()
    totals = ours.elastic.totals
    resizer = scheduler_of(scheduler).resizer
    return {
        "enabled": True,
        "mode": ours.settings.mode,
        "policy": _policy(ours),
        "hardware": None if ours.hardware is None else dataclasses.asdict(ours.hardware),
        "layer_group": ours.table.shape.layer_group,
        "layer_groups": ours.table.shape.num_groups,
        "block_tokens": ours.table.shape.block_tokens,
        "device_units_total": statistics.units_total,
        "device_units_free": statistics.units_free,
        "running": len(scheduler.running_batch.reqs),
        "prefilling": int(scheduler.chunked_req is not None),
        "waiting": len(scheduler.waiting_queue),
        "cached_ratio_mean": statistics.cached_ratio_mean,
        "uncached_tokens": statistics.uncached_tokens,
        "recomputed_tokens_total": totals.recomputed_tokens,
        "evicted_units_total": totals.evicted_units,
        "host_units_total": statistics.host_units_total,
        "host_units_free": statistics.host_units_free,
        "host_logical_tokens": _host_logical_tokens(ours),
        "saved_units_total": totals.saved_units,
        "fetched_units_total": totals.fetched_units,
        "fetched_ahead_units_total": totals.fetched_ahead_units,
        "borrowed_units_total": totals.borrowed_units,
        "projected_units_total": totals.projected_units,
        "swap_stall_ms_total": totals.swap_stall_s * 1e3,
        "restored_units_total": totals.restored_units,
        "steps_total": 0 if ours.iteration is None else ours.iteration.controller.steps.steps,
        "compiled_steps_total": 0 if ours.compiled is None else ours.compiled.steps,
        "retractions_total": totals.retractions,
        "pauses_total": totals.pauses,
        "page_table_ms_total": totals.page_table_s * 1e3,
        "relocated_units_total": totals.relocated_units,
        "bytes": dataclasses.asdict(ours.memory.describe()),
        "activations": dataclasses.asdict(ours.elastic.room.activations),
        "device_bytes_reserved": ours.pool.buffer.nbytes,
        "device_bytes_committed": ours.pool.bytes_behind(statistics.units_committed),
        "device_bytes_at_start": ours.pool.bytes_behind(resizer.start_units),
        "resize": {
            "start_tokens": ours.table.shape.tokens_in(resizer.start_units),
            "most_tokens": ours.table.shape.tokens_in(ours.table.num_units),
            "wanted_tokens": ours.table.shape.tokens_in(resizer.wanted_units),
            "outcome": resizer.outcome,
        },
        "budget": None if ours.sizing is None else ours.sizing.describe(),
        "kv_store": None if ours.stored is None else ours.stored.describe(),
        "pool": dataclasses.asdict(statistics),
    }


def _host_logical_tokens(ours: Context) -> int | None:
    """What policies count on of the host tier (`engine/host_buffer.py`); None: all of it."""
    buffer = None if ours.iteration is None else ours.iteration.controller.host_buffer
    return None if buffer is None else buffer.tokens


def _policy(ours: Context) -> dict[str, Any]:
    """The policy in force, and how often its answer had to be replaced."""
    if ours.iteration is None:
        return {"name": ours.policy_name}
    safe = ours.iteration.controller.guard
    return {
        "name": ours.policy_name,
        "budget_ms": safe.budget_s * 1e3,
        "decisions": safe.asked,
        "fallbacks": dict(safe.failures),
    }


def _steps(ours: Context) -> list[dict[str, Any]]:
    """The last measured steps: work, time, and what each latency model said of them."""
    if ours.iteration is None or ours.hardware is None:
        return []
    loop = ours.iteration.controller
    paper = PaperLatencyModel(loop.limits.model, ours.hardware)
    return [
        {
            **{name: float(value) for name, value in vars(step.work).items()},
            "seconds": step.seconds,
            "predicted_s": step.predicted_s,
            "paper_s": float(paper.step_seconds(step.work)),
            "swap_stall_s": step.swap_stall_s,
            "ended_s": step.ended_s,
        }
        for step in loop.steps.reports
    ]


def integrity(scheduler: Scheduler) -> str:
    """ "ok", or what is wrong with this rank's page table or, with tensor parallelism, another's.

    The tables must not only be consistent but alike: each rank holds its heads of the same blocks.
    Takes time in proportion to the pool, 80 ms with a million tokens; and all ranks must call it.
    """
    table = context_of(scheduler).table
    mine = _examined(table)
    count = adapter().ranks(scheduler).tp_size
    if count == 1:
        return mine[0]
    ranks: list[Any] = [None] * count
    torch.distributed.all_gather_object(ranks, mine, group=scheduler.tp_group.cpu_group)
    for rank, (found, statistics, digest) in enumerate(ranks):
        if found != "ok":
            return f"rank {rank}: {found}"
        if statistics != ranks[0][1]:
            return f"rank {rank} has {statistics}, rank 0 has {ranks[0][1]}"
        if digest != ranks[0][2]:
            return f"rank {rank} has KV in other units than rank 0"
    return "ok"


def _examined(table: PageTable) -> tuple[str, dict[str, Any], str]:
    """What is wrong with this rank's page table, or "ok"; its statistics, and its digest."""
    try:
        table.check_integrity()
        return "ok", dataclasses.asdict(table.statistics()), table.digest()
    except IntegrityError as error:
        return str(error), {}, ""
    except Exception as error:
        logger.exception("eLLM: the page table cannot be checked")  # the other ranks wait for it
        return repr(error), {}, ""


def control(original: Callable[..., Any], scheduler: Scheduler, request: Any) -> Any:
    """Around `Scheduler.handle_dumper_control`, the one request between SGLang's HTTP process
    and its scheduler that carries a name and a JSON body, and brings JSON back."""
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    if not request.method.startswith(CONTROL):
        return original(scheduler, request)
    method = request.method.removeprefix(CONTROL)
    who = {REPLICA: adapter().ranks(scheduler).dp_rank or 0}
    try:
        response = [who, *_CONTROLS[method](scheduler, request.body)]
        answer = DumperControlReqOutput(success=True, response=response)
    except ConfigError as error:
        answer = DumperControlReqOutput(success=False, response=[who], error=str(error))
    except Exception as error:
        if method not in LOOKING:
            raise
        logger.exception("eLLM: /ellm/%s cannot be answered", method)  # to look ends nobody
        answer = DumperControlReqOutput(success=False, response=[who], error=repr(error))
    return scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)


def _refuse_in_a_baseline(scheduler: Scheduler, what: str) -> None:
    """Raise ConfigError where the mode decides by itself."""
    config = context_of(scheduler).settings
    if config.is_baseline:
        raise ConfigError(
            f"{what} cannot be changed: the server runs in mode {config.mode}, which decides by "
            "itself"
        )


def _state(scheduler: Scheduler, body: dict[str, Any]) -> list[dict[str, Any]]:
    """`describe`; and, if `body` asks for it, with the entry "integrity"."""
    if not body["integrity"]:
        return [describe(scheduler)]
    found = integrity(scheduler)  # first: all ranks take part in it, whatever else fails
    return [describe(scheduler) | {"integrity": found}]


def _switch(scheduler: Scheduler, body: dict[str, Any]) -> list[dict[str, Any]]:
    _refuse_in_a_baseline(scheduler, "the policy")
    ours = scheduler_of(scheduler)
    # On every rank alike, whether rank 0 can make the policy or not.
    ours.iteration.ask_anew()
    if ours.asks:
        with own_randomness(scheduler):
            policy = create(body["name"], body["options"], FIRST_ANSWER_S)
        switch_policy(scheduler, body["name"], policy)
    return []


def _come_to(scheduler: Scheduler, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As `adjust` with `ellm_device_kv_tokens`, for whoever wants to know why not."""
    units = _wanted_units(scheduler, {DEVICE_TOKENS: body["tokens"]})
    assert units is not None
    _resize(scheduler, units)
    return []


_CONTROLS: dict[str, Callable[[Scheduler, dict[str, Any]], list[dict[str, Any]]]] = {
    "state": _state,
    "steps": lambda scheduler, _: _steps(context_of(scheduler)),
    "requests": lambda scheduler, _: [describe_requests(scheduler)],
    "policy": _switch,
    "resize": _come_to,
}
LOOKING = ("state", "steps", "requests")
"""Those that change nothing."""


def adjust(original: Callable[..., Any], scheduler: Scheduler, request: SetInternalStateReq) -> Any:
    """Around `Scheduler.set_internal_state`: take our keys, leave SGLang the others.

    `ellm_ratio`: the fixed-ratio policy with this ratio. `ellm_device_kv_tokens`: the device pool's
    size, which free units come to at once, and those in use or to be committed step by step
    (`Resizer`): the state tells what has become of it. SGLang's answer has no place for why one is
    refused: the log tells.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    sizing = context_of(scheduler).sizing
    if sizing is not None and sizing.key in request.server_args:
        sizing.apply(scheduler_of(scheduler), int(request.server_args[sizing.key]))
        return None  # nobody asked who waits for an answer
    ratio_too = RATIO in request.server_args
    theirs = {k: v for k, v in request.server_args.items() if k not in (RATIO, DEVICE_TOKENS)}
    try:
        units = _wanted_units(scheduler, request.server_args)
        policy = _wanted_policy(scheduler, request.server_args)
    except ConfigError as error:
        logger.warning("set_internal_state refused, nothing has changed: %s", error)
        return SetInternalStateReqOutput(updated=False)
    if theirs:
        request.server_args = theirs
        result = original(scheduler, request)
        if not result.updated:
            return result
    if ratio_too:
        scheduler_of(scheduler).iteration.ask_anew()  # on every rank alike
    if policy is not None:
        switch_policy(scheduler, "fixed-ratio", policy)
    if units is not None:
        _resize(scheduler, units)
    return SetInternalStateReqOutput(updated=True)


def _resize(scheduler: Scheduler, units: int) -> None:
    """At once, or, where servers share a budget, to no more than so many: the rest is a question
    of shares. What has been released comes back at that size."""
    sizing, ours = context_of(scheduler).sizing, scheduler_of(scheduler)
    if ours.released is not None:
        ours.released = dataclasses.replace(ours.released, units=units)
    else:
        ours.resize(ours.at_once(units))
    if sizing is not None:
        sizing.told_to_come_to(units, ours.resizer)


def _wanted_policy(scheduler: Scheduler, values: dict[str, Any]) -> Policy | None:
    """The policy asked for, if any, where policies are asked: on rank 0. ConfigError, on every
    rank, where the value makes no sense or the policy cannot be made."""
    if RATIO not in values:
        return None
    _refuse_in_a_baseline(scheduler, RATIO)
    _check(RATIO, values[RATIO], SHARE, "the share of each request's tokens to leave uncached")
    made: list[Policy] = []

    def problem() -> str:
        try:
            made.append(create("fixed-ratio", {"ratio": values[RATIO]}))
        except ConfigError as error:
            return str(error)
        return ""

    if text := of_rank_0(scheduler, problem):
        raise ConfigError(text)
    return made[0] if made else None


def _wanted_units(scheduler: Scheduler, values: dict[str, Any]) -> int | None:
    """The device's units asked for, if so. ConfigError where the value makes no sense."""
    if DEVICE_TOKENS not in values:
        return None
    ours = context_of(scheduler)
    if ours.settings.mode == RECOMPUTE:
        raise ConfigError(f"{DEVICE_TOKENS}: mode {RECOMPUTE} leaves memory to SGLang")
    tokens, shape = values[DEVICE_TOKENS], ours.table.shape
    blocks = ours.table.num_units // shape.num_groups
    allowed = Range(shape.block_tokens, (blocks + 1) * shape.block_tokens, high_open=True)
    most = f"the tokens of KV that the device may hold, at most {blocks * shape.block_tokens:,}"
    _check(DEVICE_TOKENS, tokens, allowed, f"{most} (--ellm-max-device-kv-tokens)")
    units = int(tokens // shape.block_tokens) * shape.num_groups
    if ours.sizing is not None and units < ours.sizing.least_units:
        raise ConfigError(
            f"{DEVICE_TOKENS} {shown(tokens)}: this server always keeps room for "
            f"{shape.tokens_in(ours.sizing.least_units)} tokens (--ellm-min-device-kv-tokens)"
        )
    return units


def _check(name: str, value: object, allowed: Range, what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {shown(value)}: give {what}, {allowed}")
