"""SGLang's `release_memory_occupation` and `resume_memory_occupation`, for the memory of KV.

SGLang wants an idle server for it, and its memory saver. Here requests may be under way: they go
back to the queue, as with its pause `retract`, and go on from their tokens when memory is back.
Meanwhile no step runs, and the pool is one block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ellm_sgl.memory import Outcome
from ellm_sgl.memory.arena import trim_heap
from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.scheduler import EllmScheduler, Released, scheduler_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

_POLL_S = 0.005
"""How often to look whether a growth has ended: a chunk takes up to 70 ms."""


def release(
    original: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: Any
) -> Any:
    """Around the scheduler's `release_memory_occupation`; does nothing where it has been done."""
    from sglang.srt.managers.io_struct import (
        PauseGenerationReqInput,
        ReleaseMemoryOccupationReqOutput,
    )

    scheduler: Any = updater.scheduler
    ours, context = scheduler_of(scheduler), context_of(scheduler)
    if ours.released is None:
        paused = bool(scheduler._engine_paused)
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        ours.released = Released(ours.resizer.wanted_units, paused)
        context.reclaim(ours.reclaimable())
        ours.resizer.ask(context.table.shape.num_groups, idle=True)
        while ours.resizer.outcome is Outcome.UNDER_WAY:  # a growth ends with what it has begun
            time.sleep(_POLL_S)
            ours.resizer.step(idle=True)
        trim_heap()
        _tell(ours, scheduler)
    return ReleaseMemoryOccupationReqOutput()


def resume(
    original: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: Any
) -> Any:
    """Around the scheduler's `resume_memory_occupation`; does nothing where nothing is released.
    Memory comes back beside the steps; where it is shared, as requests need it."""
    from sglang.srt.managers.io_struct import (
        ContinueGenerationReqInput,
        ResumeMemoryOccupationReqOutput,
    )

    scheduler: Any = updater.scheduler
    ours = scheduler_of(scheduler)
    if (released := ours.released) is not None:
        ours.released = None
        ours.resizer.ask(ours.at_once(released.units))
        _tell(ours, scheduler)
        if not released.paused:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return ResumeMemoryOccupationReqOutput()


def go_on(original: Callable[..., None], scheduler: Scheduler, request: Any) -> None:
    """Around the scheduler's `continue_generation`: while memory is released nobody goes on, and
    when it is back everybody does."""
    ours = scheduler_of(scheduler)
    if ours.released is None:
        original(scheduler, request)
    else:
        ours.released = replace(ours.released, paused=False)


def _tell(ours: EllmScheduler, scheduler: Scheduler) -> None:
    """Whoever decides on the size: rank 0's thread."""
    if (sizing := context_of(scheduler).sizing) is not None:
        sizing.released(ours.released is not None, ours.resizer)
