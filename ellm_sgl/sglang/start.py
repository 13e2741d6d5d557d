"""Starts the closed loop once SGLang's scheduler stands."""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ellm_sgl import latency
from ellm_sgl.config import RECOMPUTE, ConfigError
from ellm_sgl.config.resolve import policy_of
from ellm_sgl.engine import Arrival, Controller, Iteration, RequestTable, ServerLimits, StepLog
from ellm_sgl.engine.request_table import entries_array
from ellm_sgl.policies import Policy, Stock
from ellm_sgl.sglang.calibration import calibrate, model_shape
from ellm_sgl.sglang.compiled_layers import compile_layers
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.fingerprint import open_prefixes
from ellm_sgl.sglang.metrics import metrics_of
from ellm_sgl.sglang.ranks import own_randomness
from ellm_sgl.sglang.replicas import in_turn
from ellm_sgl.sglang.scheduler import EllmScheduler, scheduler_of
from ellm_sgl.sglang.start_screen import screen
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def end_in_a_sentence(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Around `Scheduler.__init__`: a `ConfigError` ends the server with its sentence.

    SGLang ends it as well, but with the stack. Where the scheduler is no process of its own, the
    error is the caller's.
    """
    try:
        original(*args, **kwargs)
    except ConfigError as error:
        server = multiprocessing.parent_process()
        if server is None:
            raise
        print(f"ellm-sgl: error: {error}", file=sys.stderr, flush=True)
        if server.pid is not None and server.pid == os.getppid():  # it has not ended
            os.kill(server.pid, signal.SIGQUIT)  # as SGLang does: it ends all its processes
        sys.exit(2)


def start_loop(_: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: measure the machine, build the policy, ask it once.

    Only rank 0's policy is asked; on the others SGLang's way stands in its place.
    """
    ours = context_of(scheduler)
    settings, ranks = ours.settings, adapter().ranks(scheduler)
    shape = model_shape(scheduler.model_config, ranks.tp_size)
    runner = scheduler.tp_worker.model_runner
    ours.attach(runner.model.model)
    # The other ranks wait for what rank 0 has measured.
    with in_turn(scheduler.server_args.dp_size if ranks.tp_rank == 0 else 1):
        ours.compiled = compile_layers(runner, ours)
        ours.hardware, activations = calibrate(runner, ours, shape)
    if ours.compiled is not None:
        ours.compiled.steps = 0
    room = ours.elastic.room
    room.activations = activations
    if settings.mode != RECOMPUTE:  # which leaves memory to SGLang
        arguments = adapter().resolved(scheduler.server_args)
        room.chunk_rows = scheduler.chunked_prefill_size or arguments.max_prefill_tokens
    model = latency.BY_NAME[settings.latency_model](shape, ours.hardware)
    limits = ServerLimits(
        model=shape,
        hardware=ours.hardware,
        max_running=scheduler.max_running_requests,
        tpot_slo_s=math.inf if settings.tpot_slo_ms is None else settings.tpot_slo_ms / 1e3,
        max_restored_tokens=ours.elastic.max_restored_tokens,
        host_scaling=settings.host_scaling,
    )
    with own_randomness(scheduler):
        controller = Controller(
            policy_of(settings) if ranks.tp_rank == 0 else Stock(),
            settings.policy_budget_ms / 1e3,
            StepLog(model),
            limits,
        )
        iteration = Iteration(controller, ours.elastic, ours.pool.unit_bytes)
        warm_up(iteration)
    ours.iteration, ours.scheduler = iteration, EllmScheduler(iteration, scheduler)
    ours.scheduler.metrics = metrics_of(scheduler)
    if settings.kv_store is not None:
        ours.stored = open_prefixes(ours, scheduler, ours.scheduler.least_of_ranks)
    if ours.sizing is not None and ranks.tp_rank == 0:
        ours.sizing.start(scheduler, ours.scheduler.resizer)
    if ranks.tp_rank == 0:
        logger.info("%s", screen(scheduler, ours))


def switch_policy(scheduler: Scheduler, name: str, policy: Policy) -> None:
    """Ask `policy` from the next iteration on."""
    ours = scheduler_of(scheduler)
    ours.iteration.ask_anew()
    if ours.asks:
        with own_randomness(scheduler):
            ours.iteration.controller.switch(policy)
            warm_up(ours.iteration)
    context_of(scheduler).policy_name = name


def warm_up(iteration: Iteration) -> None:
    """Ask about some made-up requests under pressure, so that the imports and compilations of a
    policy are not the first step's."""
    elastic, controller = iteration.elastic, iteration.controller
    memory = elastic.memory_state(elastic.table.sequence_ids)
    tokens = memory.device_tokens
    # What a policy remembers of these shall fit no request to come.
    table, now = RequestTable(first_id=-6), iteration.clock()
    arrival = Arrival(tokens // 2, tokens // 2, 64, now, 0, math.inf, math.inf)
    entries = entries_array(
        [table.add(dataclasses.replace(arrival, priority=i), now) for i in range(6)]
    )
    lengths, none = np.full(4, tokens // 2), np.zeros(4, np.int64)
    running = table.running(entries[:4], lengths, none, none, none, now)
    waiting, nobody = (table.waiting(some, now) for some in (entries[4:], entries[:0]))
    state = controller.state(now, running, waiting, nobody, memory, table.lengths(running))
    controller.guard.warm_up(state)
