"""A server that is paused rests until it is asked for something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ellm_sgl.memory import Outcome
from ellm_sgl.sglang.scheduler import scheduler_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def rest(scheduler: Scheduler, requests: Sequence[Any]) -> None:
    """Before `Scheduler.process_input_requests`: SGLang's loops sleep where there is nothing to do
    (`--sleep-on-idle`), but while generation is paused they take all of a core. As when it is idle,
    the rank that receives requests waits for one, for a second at most, and the others for it."""
    under_way = scheduler_of(scheduler).resizer.outcome is Outcome.UNDER_WAY
    if scheduler._engine_paused and not requests and not under_way:
        scheduler.maybe_sleep_on_idle()
