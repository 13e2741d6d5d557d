"""What an `Engine`'s processes run: SGLang's own functions, reached through this package, whose
import prepares a new process for SGLang (`ellm_sgl/__init__.py`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """What is imported here stays: to look through it again and again takes a fifth of the time."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`."""
    with importing():
        from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_detokenizer_process`."""
    with importing():
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
