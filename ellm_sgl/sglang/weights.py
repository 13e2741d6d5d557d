"""New weights while the server runs: nothing of the old ones stays behind.

KV that is missing is computed again, with the weights of that moment. A request whose other KV is
from before would get KV of two models. So an update needs every request without KV (none runs, or
SGLang's pause has sent them back to the queue), and what the prefix cache holds is dropped with its
copies on the host: what is computed from then on is computed with the new weights alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ellm_sgl.sglang.context import context_of
from ellm_sgl.sglang.ranks import least_of_ranks
from ellm_sgl.sglang.scheduler import scheduler_of
from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

logger = logging.getLogger(__name__)
_FROM_DISK = "UpdateWeightFromDiskReqInput"
_IN_PART = "weights may be new in part: update them again"
_OVERWRITES = "reset_tensors"
"""The one action of SGLang's weight checker that changes weights."""


def update(
    original: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: Any
) -> Any:
    """Around the scheduler's `update_weights_from_*`: after what the old weights computed is gone,
    or not at all."""
    if problem := _drop_all_kv(updater.scheduler):
        return _answer(request, problem)
    try:
        return _done_by_all(original, updater, request)
    finally:
        if (stored := context_of(updater.scheduler).stored) is not None:
            stored.drop()


def _done_by_all(
    original: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: Any
) -> Any:
    """SGLang's answer, or why it failed, which would end its scheduler: on every rank, or the ranks
    would go on with different weights. With several, only where none waits for the others within
    SGLang's own update: from disk."""
    scheduler: Any = updater.scheduler
    several = adapter().ranks(scheduler).tp_size > 1
    if several and type(request).__name__ != _FROM_DISK:
        return original(updater, request)
    try:
        answer = original(updater, request)
    except Exception as error:
        logger.exception("eLLM: new weights were not loaded to the end")
        answer = _answer(request, f"{error!r}; {_IN_PART}")
    if several and not least_of_ranks(scheduler, [int(answer.success)])[0] and answer.success:
        return _answer(request, f"another rank could not load them; {_IN_PART}")
    return answer


def check(
    original: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: Any
) -> Any:
    """Around the scheduler's `check_weights`, which can overwrite them."""
    if request.action == _OVERWRITES:
        return update(original, updater, request)
    return original(updater, request)


def flush(
    original: Callable[..., Any],
    updater: SchedulerWeightUpdaterManager,
    request: Any,
    *outcome: Any,
) -> Any:
    """Around `flush_cache_after_weight_update`. The cache is empty by now; SGLang's own flush wants
    an empty queue too, and ends the scheduler where retracted requests wait in it; from 0.5.23 it
    says that the update has failed. `outcome`: of that, from 0.5.23, which is then the answer."""
    if updater.is_fully_idle():
        return original(updater, request, *outcome)
    if request.flush_cache and request.torch_empty_cache:
        from sglang.srt.platforms import current_platform

        current_platform.empty_cache()
    return outcome or None


def _answer(request: Any, problem: str) -> Any:
    """SGLang's to a request that has failed."""
    from sglang.srt.managers import io_struct

    answer = type(request).__name__.replace("ReqInput", "ReqOutput")
    return getattr(io_struct, answer)(success=False, message=problem)


def _drop_all_kv(scheduler: Any) -> str | None:
    """Drop all KV that is kept for later. Returns, in one sentence, why some has to stay."""
    ours = context_of(scheduler)
    if held := len(ours.table.sequence_ids):
        return (
            f"KV of the present weights is in use (requests: {held}), and eLLM would complete it "
            "with KV of the new ones; pause with mode retract or abort, not in_place, then update"
        )
    if ours.prefix_cache is not None:
        ours.reclaim(ours.prefix_cache.evictable_size())
    if kept := ours.table.num_blocks - ours.table.free_blocks:
        return f"cached prefixes are in use (blocks: {kept}); abort what uses them, then update"
    return None


def pause(
    original: Callable[..., None], scheduler: Scheduler, request: PauseGenerationReqInput
) -> None:
    """Around the scheduler's `pause_generation`: what the pause is to those who wait and to the
    clock that times steps."""
    ours = scheduler_of(scheduler)
    if request.mode == "retract":
        # The last step's tokens are those of who had a part in it. By the next one's report these
        # may have gone, and others have their entries.
        ours.iteration.report()
    before = set(scheduler.waiting_queue)
    original(scheduler, request)
    if ours.released is not None:
        ours.released = replace(ours.released, paused=True)
    ours.retracted([req for req in scheduler.waiting_queue if req not in before])
    ours.iteration.idle()
