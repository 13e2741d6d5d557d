"""A server with data parallelism: SGLang's schedulers beside each other, each with its own eLLM.

SGLang sends every request to one of them, and what eLLM asks (`state.control`) to all. Each answer
begins with the number of its replica, since they come in any order.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTROL = "ellm/"
"""Prefix of the methods that `state.control` answers in the scheduler."""
REPLICA = "replica"


@dataclass(frozen=True)
class Answer:
    """Of one replica."""

    replica: int
    found: list[dict[str, Any]]
    error: str
    """Why it did not do what it was asked; empty where it did."""


async def ask_replicas(manager: Any, method: str, body: Mapping[str, Any]) -> list[Answer]:
    """What `state.control` answers in each replica, in their order.

    Args:
        manager: SGLang's `TokenizerManager`.
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    request = DumperControlReqInput(method=CONTROL + method, body=dict(body))
    answers = [
        Answer(answer.response[0][REPLICA], answer.response[1:], answer.error)
        for answer in await manager.dumper_control(request)
    ]
    return sorted(answers, key=lambda answer: answer.replica)


def error_of(answers: Sequence[Answer]) -> str:
    """Why it was not done everywhere, and where it was; empty where all did it."""
    refused = [answer for answer in answers if answer.error]
    if len({answer.error for answer in answers}) == 1:
        return answers[0].error
    told = "; ".join(f"replica {answer.replica}: {answer.error}" for answer in refused)
    return told if len(refused) == len(answers) else f"{told}; the other replicas have done it"


async def keeps_weights(manager: Any) -> str:
    """Why a server cannot be given new weights as a whole, in a sentence; empty where it can, or
    its one replica says so itself. Each replica decides for itself (`weights.update`), and while
    all are paused one may hold KV of the present weights and another none."""
    if manager.server_args.dp_size == 1 or not manager.is_pause:
        return ""
    answers = await ask_replicas(manager, "state", {"integrity": False})
    held = {answer.replica: answer.found[0]["pool"]["sequences"] for answer in answers}
    if not any(held.values()):
        return ""
    each = ", ".join(f"replica {replica}: {requests}" for replica, requests in held.items())
    return (
        f"KV of the present weights is in use (requests of {each}); pause with mode retract or "
        "abort, not in_place, then update"
    )


def one_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """The first replica's, and with more than one, under "replicas", that of each."""
    first = answers[0].found[0]
    if len(answers) == 1:
        return first
    return first | {"replicas": [{REPLICA: a.replica, **a.found[0]} for a in answers]}


def all_of(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Those of all replicas, each with its replica where there is more than one."""
    if len(answers) == 1:
        return answers[0].found
    return [{REPLICA: answer.replica, **found} for answer in answers for found in answer.found]


@contextmanager
def in_turn(replicas: int) -> Iterator[None]:
    """Within it a replica has the machine to itself: others that want to come in wait.

    The lock is this file's, so that nothing is left behind, however a process ends.
    """
    if replicas == 1:
        yield
        return
    fd = os.open(Path(__file__), os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # file systems without locks: they measure side by side
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
