"""SGLang's watchdog looks after its replicas' schedulers, too.

It ends a server whose scheduler has gone, but looks at its own child processes only. With data
parallelism those are a controller's: one that is killed from outside went unnoticed, and whoever
was sent to it waited for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Iterable
from typing import Any

from ellm_sgl.config import EllmConfig

logger = logging.getLogger(__name__)


class Replica:
    """The scheduler of a replica, as SGLang's watchdog looks at processes. With one the others end:
    SGLang would look for a minute what those that still run are doing.

    Args:
        pid: of a process that runs, and is no child of this one.
        others: the list that it, too, is in.
    """

    exitcode = "unknown"
    """Only its parent is told."""

    def __init__(self, pid: int, others: list[Replica]) -> None:
        self.pid = pid
        self._others = others
        self._file = os.pidfd_open(pid)
        """Of this process alone: a number may be used again."""

    def is_alive(self) -> bool:
        """Whether it is there. Says that it is not, and ends the others."""
        ended, _, _ = select.select([self._file], [], [], 0)
        if ended:
            logger.error(
                "eLLM: process %d, a replica's scheduler, has ended: killed from outside, or out "
                "of memory. The server ends, since whoever is sent to it would wait for ever",
                self.pid,
            )
            for other in self._others:
                other.end()
        return not ended

    def end(self) -> None:
        """At once; does nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)


def replicas_of(pids: Iterable[int]) -> list[Replica]:
    """Those that run with these numbers."""
    found: list[Replica] = []
    found.extend(Replica(pid, found) for pid in pids)
    return found


def watch_replicas(
    launched: tuple[Any, list[Any]], _: Any, server_args: Any, *__: Any, **___: Any
) -> None:
    """Hook after `Engine._launch_scheduler_processes`: once the replicas stand, their schedulers
    are among the processes that SGLang's watchdog is given.

    Args:
        launched: SGLang's `SchedulerInitResult`, and its child processes.
    """
    result, processes = launched
    if EllmConfig.from_env() is None or server_args.dp_size == 1 or server_args.node_rank != 0:
        return
    wait = result.wait_for_ready

    def wait_for_ready() -> None:
        wait()
        told = [pid for info in result.scheduler_infos for pid in info["scheduler_pids"]]
        ours = {process.pid for process in processes}
        processes.extend(replicas_of(pid for pid in told if pid not in ours))

    result.wait_for_ready = wait_for_ready
