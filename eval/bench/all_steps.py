"""All steps of a load, however many: a server keeps the last ones only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.eval.bench.result import MeasurementError

PERIOD_S = 1.0
"""Between two looks: a server keeps 2,000 steps, and the fastest take 1 ms."""

Steps = list[dict[str, Any]]


@contextmanager
def all_steps(server: ServerProcess) -> Iterator[Callable[[], Steps]]:
    """While the context lasts, look at `/ellm/steps` now and then.

    Yields:
        what gives all steps since the server's start, in their order; raises MeasurementError if
        some were not seen.
    """
    seen: dict[float, dict[str, Any]] = {}
    ended = threading.Event()

    def look() -> None:
        seen.update((step["ended_s"], step) for step in server.steps())

    def watch() -> None:
        while not ended.wait(PERIOD_S):
            look()

    def found() -> Steps:
        look()
        total = server.state(integrity=False)["steps_total"]
        if len(seen) != total:
            raise MeasurementError(f"of {total} steps {len(seen)} were seen")
        return [seen[ended_s] for ended_s in sorted(seen)]

    watcher = threading.Thread(target=watch, name="steps")
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
