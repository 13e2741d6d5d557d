"""What the ranks of a server agree on: clocks and free memory differ between them, what is done
must not. All must ask in the same turn of SGLang's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from ellm_sgl.sglang.versions import adapter

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

Found = TypeVar("Found")


def is_rank_0(scheduler: Scheduler) -> bool:
    return bool(adapter().ranks(scheduler).tp_rank == 0)


def of_rank_0(scheduler: Scheduler, found: Callable[[], Found]) -> Found:
    """What rank 0 finds, on every rank."""
    if adapter().ranks(scheduler).tp_size == 1:
        return found()
    from sglang.srt.utils import broadcast_pyobj

    group = scheduler.tp_group
    mine = [found()] if is_rank_0(scheduler) else []
    (agreed,) = broadcast_pyobj(mine, group.rank, group.cpu_group, src=group.ranks[0])
    return agreed


@contextmanager
def own_randomness(scheduler: Scheduler) -> Iterator[None]:
    """Around what rank 0 alone runs, which may be others' code: a policy. Each rank samples for
    itself, with generators that began alike; a number that one of them draws besides would give
    the ranks different tokens."""
    with torch.random.fork_rng(devices=[], enabled=adapter().ranks(scheduler).tp_size > 1):
        yield


def least_of_ranks(scheduler: Scheduler, numbers: list[int]) -> list[int]:
    """The least of each of these numbers over all ranks."""
    if adapter().ranks(scheduler).tp_size == 1:
        return numbers
    least = torch.tensor(numbers)
    group = scheduler.tp_group.cpu_group
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group)
    agreed: list[int] = least.tolist()
    return agreed
