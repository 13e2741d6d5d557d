"""The logical size of the host tier follows violations of SLOs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ellm_sgl.engine.host_buffer import FACTOR, VIOLATED, WINDOW, HostBuffer
from ellm_sgl.policies import MemoryState
from ellm_sgl.policies.testing import make_state, requests

BLOCK, SLO = 16, 0.1
COUNTS = st.integers(0, 12)


def memory(host: int, free: int) -> MemoryState:
    made = make_state(
        requests([]), requests([]), device_tokens=1024, block_tokens=BLOCK, host_tokens=host
    )
    return dataclasses.replace(made.memory, host_free_tokens=free)


def iteration(
    buffer: HostBuffer, host: int, slow: int = 0, fast: int = 0, late: int = 0, early: int = 0
) -> MemoryState:
    """`slow` of those that run miss their TPOT, `late` of those that wait their TTFT."""
    tpot = np.array([2 * SLO] * slow + [SLO / 2] * fast)
    waited = np.array([3.0] * late + [1.0] * early)
    running = requests([20] * (slow + fast), tpot_s=tpot)
    waiting = requests([20] * (late + early), waited_s=waited, ttft_slo_s=np.full(len(waited), 2.0))
    return buffer.observe(running, waiting, memory(host, host))


class Machine(RuleBasedStateMachine):
    """Beside Alg. 2 as the paper writes it, on the violations of each iteration."""

    @initialize(blocks=st.integers(1, 200))
    def start(self, blocks: int) -> None:
        self.host = blocks * BLOCK
        self.buffer = HostBuffer(SLO)
        self.logical = BLOCK
        self.events: list[tuple[bool, bool]] = []

    @rule(slow=COUNTS, fast=COUNTS, late=COUNTS, early=COUNTS)
    def iterate(self, slow: int, fast: int, late: int, early: int) -> None:
        self.events.append((slow > 0.1 * (slow + fast), late > 0.1 * (late + early)))
        last = self.events[-WINDOW:]
        too_slow, too_late = (sum(e[kind] for e in last) >= VIOLATED for kind in (0, 1))
        if too_slow or too_late:
            changed = self.logical // FACTOR if too_slow else self.logical * FACTOR
            self.logical = min(max(changed, BLOCK), self.host)
            self.events = []
        seen = iteration(self.buffer, self.host, slow, fast, late, early)
        assert seen.host_tokens == self.logical == self.buffer.tokens
        assert BLOCK <= seen.host_tokens <= self.host

    @rule(used=st.integers(0, 200))
    def look(self, used: int) -> None:
        """What is stored stays, whatever the size."""
        used = min(used * BLOCK, self.host)
        quiet = requests([])
        seen = self.buffer.observe(quiet, quiet, memory(self.host, self.host - used))
        self.events.append((False, False))
        assert seen.host_free_tokens == max(self.logical - used, 0)


TestHostBuffer = pytest.mark.slow(Machine.TestCase)


def test_three_of_five_decide() -> None:
    buffer = HostBuffer(SLO)
    sizes = [iteration(buffer, 64 * BLOCK, late=kind).host_tokens for kind in (1, 0, 1, 0, 1, 1)]
    assert sizes == [BLOCK] * 4 + [2 * BLOCK] * 2


def test_tokens_that_come_too_slowly_go_before_first_tokens_that_come_too_late() -> None:
    buffer = HostBuffer(SLO)
    for _ in range(9):
        iteration(buffer, 64 * BLOCK, late=1)
    assert buffer.tokens == 8 * BLOCK
    for _ in range(VIOLATED):
        iteration(buffer, 64 * BLOCK, late=1, slow=1)
    assert buffer.tokens == 4 * BLOCK


def test_a_request_that_has_had_its_first_token_waits_for_no_other() -> None:
    """A retracted one waits again: it is not late for its first."""
    buffer = HostBuffer(SLO)
    tokens = np.array([30])
    waiting = requests(
        tokens, prompt_tokens=np.array([20]), waited_s=np.array([9.0]), ttft_slo_s=np.array([2.0])
    )
    for _ in range(WINDOW):
        buffer.observe(requests([]), waiting, memory(64 * BLOCK, 0))
    assert buffer.tokens == BLOCK
