"""What a resize does to streams, and what Linux says of a server's memory."""

from __future__ import annotations

import mmap
import os
import statistics

import pytest

from ellm_sgl.client.process import ServerError
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.client.resident import Resident
from ellm_sgl.eval.bench.resizing import Change
from ellm_sgl.eval.bench.result import MeasurementError
from ellm_sgl.eval.bench.scenarios.resize import WAYS, Resize, _paused, _times, in_either_order
from ellm_sgl.eval.bench.streams import Streams
from ellm_sgl.memory import CpuArena

MIB = 1 << 20


class Seen(Streams):
    """Streams of which everything is known already; times from 0."""

    def __init__(self, *token_s: list[float]) -> None:
        self._began = 0.0
        self.outcomes = [Outcome(Request(0.0, (1,), 9), token_s=times) for times in token_s]


def test_a_gap_counts_if_any_part_of_it_lies_in_the_span() -> None:
    seen = Seen([1.0, 2.0, 5.0, 6.0], [1.5, 2.5, 9.0])
    assert seen.gaps(2.2, 4.0) == [3.0, 1.0, 6.5]
    assert seen.gaps(5.0, 5.5) == [1.0, 6.5]
    assert seen.gaps(1.0, 5.0, whole=True) == [1.0, 3.0, 1.0]
    with pytest.raises(MeasurementError, match="ended too soon"):
        seen.gaps(5.0, 7.0)


def test_the_longest_pause_is_told_in_steps() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0]
    found = _paused(Seen(times), (0.0, 3.5), [Change(5.0, 6.0)]).figures
    assert found == {"step_s": 1.0, "pause_steps": 5.0, "p99_of_before": 5.0}
    assert _times([Change(0, 1), Change(2, 5), Change(6, 8)]) == {"seconds": 2.0, "slowest": 3.0}
    assert statistics.median(Seen(times).gaps(0.5, 3.5)) == 1.0


def test_a_gibibyte_of_the_demo_model_and_only_the_servers_that_are_needed() -> None:
    assert Resize().gib == (1 << 30) // 4096
    assert set(Resize().starters()) == set(WAYS.values())
    assert set(Resize(only=("idle",)).starters()) == {"idle"}


def test_who_is_started_first_does_not_count() -> None:
    first, own = 0.97, 0.995
    assert in_either_order([own * first, own / first] * 3) == pytest.approx([own] * 3)
    assert in_either_order([0.9, 1.0, 0.8]) == pytest.approx([0.9**0.5, 0.8])


class Here(Resident):
    """This process."""

    def __init__(self) -> None:
        self._is(os.getpid())


def test_linux_tells_what_an_arena_has() -> None:
    arena, here = CpuArena(37 * MIB), Here()
    assert here.of_range(arena.nbytes) == 0
    before, faults = here.bytes(), here.faults()
    arena.commit(0, 8 * MIB)
    assert here.of_range(arena.nbytes) == 8 * MIB
    assert 7 * MIB < here.bytes() - before < 12 * MIB and here.faults() > faults
    arena.decommit(4 * MIB, 8 * MIB)
    assert here.of_range(arena.nbytes) == 4 * MIB
    with pytest.raises(ServerError, match="has no range of 4,096 bytes"):
        here.of_range(mmap.PAGESIZE)


def test_a_process_without_a_scheduler_is_no_server() -> None:
    with pytest.raises(ServerError, match="has no scheduler"):
        Resident(os.getpid())
