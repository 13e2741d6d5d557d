"""What copies between host and device, as late as a life wants it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class LateWorker:
    """Stands for the streamer's thread: one job after the other, each as late as `patience` lets
    it, and at the latest when its result is asked for."""

    def __init__(self) -> None:
        self.patience = 0
        """Turns of others that a job lets pass; 0: it is done at once."""
        self._jobs: deque[tuple[Job, int]] = deque()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        job = Job(self, lambda: function(*args))
        self._jobs.append((job, self.patience))
        self.pass_time()
        return job

    def pass_time(self) -> None:
        """Something else happens, and the jobs that are due get done."""
        waiting = list(self._jobs)
        self._jobs = deque((job, left - 1) for job, left in waiting)
        while self._jobs and self._jobs[0][1] < 0:
            self._jobs.popleft()[0].do()

    def do_until(self, job: Job) -> None:
        while not job.done():
            self._jobs.popleft()[0].do()


class Job(Future[Any]):
    """A copy that is to be made."""

    def __init__(self, worker: LateWorker, work: Callable[[], Any]) -> None:
        super().__init__()
        self._worker, self._work = worker, work

    def do(self) -> None:
        try:
            result = self._work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        self._worker.do_until(self)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._worker.do_until(self)
        return super().exception(0)
