"""What an `Engine`'s processes run: SGLang's own functions, reached through this package, whose
import prepares a new process for SGLang (`ellm_sgl/__init__.py`)."""

from __future__ import annotations

from typing import Any


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process`."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_detokenizer_process`."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
