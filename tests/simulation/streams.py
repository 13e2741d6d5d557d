"""A device that works behind the host's back, as a CUDA device does: streams and events, no more.

```
 host        step 1 ─ step 2 ─ wait for step 1 ─ step 3 ...
 computing     [ step 1 ][ step 2 ]                        each stream in its own order,
 copying    [ fetch ]      [ fetch ][ save ]               events between them
```

Nothing is done before the host waits for something, and then no more than that takes; of two
streams that could go on, the one that is to be hurried does. So whatever order the events do not
enforce comes about in some life.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias


class Event:
    """As `torch.cuda.Event`: passed once its stream has come by where it was recorded last."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark = _Mark(passed=True)

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _Mark(passed=False)
        (stream or self._device.current_stream()).put(self._mark.pass_by)

    def synchronize(self) -> None:
        """The host waits."""
        self._device.work_until(self._mark)

    @property
    def mark(self) -> _Mark:
        return self._mark


class _Mark:
    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def pass_by(self) -> None:
        self.passed = True


class Stream:
    """As `torch.cuda.Stream`: work that is done in the order in which it was given."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._work: deque[Callable[[], None] | _Mark] = deque()

    def put(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def wait_event(self, event: Event) -> None:
        """What is put from now on is done after the event."""
        self._work.append(event.mark)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._device)
        event.record(other)
        self.wait_event(event)

    def go_on(self) -> bool:
        """Do one thing, if there is one that may be done."""
        while self._work and isinstance(first := self._work[0], _Mark):
            if not first.passed:
                return False
            self._work.popleft()
        if not self._work:
            return False
        work = self._work.popleft()
        assert not isinstance(work, _Mark)
        work()
        return True


_Stream: TypeAlias = Stream
_Event: TypeAlias = Event


class Device:
    """Stands for the module `torch.cuda`."""

    def __init__(self) -> None:
        self.hurries_copies = False
        """Else the stream that computes goes first."""
        self._streams: list[Stream] = []
        self._current = self.Stream()

    def Stream(self) -> _Stream:  # noqa: N802 (torch's name)
        stream = Stream(self)
        self._streams.append(stream)
        return stream

    def Event(self) -> _Event:  # noqa: N802 (torch's name)
        return Event(self)

    def current_stream(self) -> _Stream:
        return self._current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """What is given to the device in this context is given to `stream`."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def work_until(self, mark: _Mark) -> None:
        while not mark.passed:
            order = reversed(self._streams) if self.hurries_copies else iter(self._streams)
            assert any(stream.go_on() for stream in order), "streams wait for each other"

    def synchronize(self) -> None:
        """All is done."""
        while any(stream.go_on() for stream in self._streams):
            pass
