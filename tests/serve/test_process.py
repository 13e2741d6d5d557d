"""Ctrl-C is heard while a server starts, whatever the interpreter does at that moment."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ellm_sgl.serve.process import interrupts_remembered, stop_on_signals

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class KillsWhenFinalized:
    """What a signal's handler raises in a finalizer, the interpreter drops."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):  # the handler runs in here
            pass


def lose(number: int) -> None:
    made = KillsWhenFinalized(number)
    del made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_interrupt_is_raised_after_all(number: int) -> None:
    with stop_on_signals(), interrupts_remembered() as raise_lost:
        raise_lost()  # none has come
        lose(number)
        with pytest.raises(KeyboardInterrupt):
            raise_lost()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_not_lost_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_remembered():
        signal.raise_signal(signal.SIGINT)


def test_other_threads_may_start_servers_too() -> None:
    def start() -> bool:
        with interrupts_remembered() as raise_lost:
            raise_lost()
        return True

    with ThreadPoolExecutor(1) as other:
        assert other.submit(start).result()
