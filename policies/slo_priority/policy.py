"""Urgent requests first: in the queue, in memory and, by pausing others in turn, in time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ellm_sgl.config.ranges import SHARE
from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import (
    Batch,
    FloatArray,
    IntArray,
    Policy,
    Ratios,
    Requests,
    SystemState,
    WorkSplit,
)
from ellm_sgl.policies.pausing.choice import Pausing
from ellm_sgl.policies.pausing.rotation import Rotation, RotationDecision
from ellm_sgl.policies.pausing.urgency import Urgency
from ellm_sgl.policies.planned import evictable_tokens, running_and, select
from ellm_sgl.policies.problem.candidates import (
    Candidates,
    gained,
    ratios_for,
    to_evict,
    unowned_tokens,
)
from ellm_sgl.policies.problem.even_share import EvenShare
from ellm_sgl.policies.problem.standing import Standing
from ellm_sgl.policies.slo_priority.admission import (
    MOST_ADMITTED,
    PrefillBudget,
    admit,
    affordable,
    paced,
)
from ellm_sgl.policies.slo_priority.levels import (
    LEVELS,
    Levels,
    Overtaken,
    keep_weights,
    rank_levels,
)
from ellm_sgl.policies.slo_priority.program import EvictionCosts, EvictionProgram, whole_blocks
from ellm_sgl.policies.slo_priority.schedule import Losses, Schedule, build
from ellm_sgl.policies.work_split import plan_split

GROWTH_STEPS = 4
"""A new plan leaves room for so many further steps, in which running requests grow."""
SCARCE = 0.5
"""Share of device memory below which free memory counts as pressure."""
DRIFT = 0.1
"""The program is solved again when what memory lacks has changed by this share; till then its last
optimum is rounded to the new need."""
ASK_AGAIN = 32
"""Iterations after which a queue from which nobody could be admitted, and a schedule, are looked at
again though no request has come, been admitted or left."""


class SloPriority(Policy):
    """Tells requests apart by `priority` and, where it is equal, by whether they have an SLO.

    - Queue: by level, then arrival; see `levels.queue_order` for how ageing bounds the wait.
    - Batch size: as `fcfs`; urgent requests are admitted at the others'
      expense.
    - Ratios: a convex program that evicts less urgent requests first; evenly where none are.
    - Time: less urgent requests pause at times, where the urgent ones' SLO or pressure asks for it.
      Where restoring does not pay some of the least urgent pause until there is room, as those
      of `fcfs` do; nobody is admitted then but more urgent requests.
    - Where `fcfs` rotates, so do these: the less urgent pause first, nobody for anyone less urgent,
      and more urgent requests are admitted at the others' expense.
    - In both cases pauses make a request more urgent as waiting does; see `levels.Overtaken`.

    Args:
        loss: share of tokens per second that pauses may cost in the mean while they are needed, by
            the latency model; more makes urgent requests faster. Where pauses keep an SLO they may
            cost more. 0 turns them off.
    """

    def __init__(self, loss: float = 0.06) -> None:
        SHARE.check("loss", loss)
        self._program = EvictionProgram()
        self._ranked: Standing[Levels] | None = None
        self._refused: Standing[None] | None = None
        """Nobody could be admitted. While the requests are the same, running ones only grow: it
        gets no easier."""
        self._overtaken = Overtaken()
        self._pausing = Pausing()
        self._evicted_of: IntArray | None = None
        """n_i of the running requests while some pause until there is room."""
        self._rotation = Rotation()
        self._rotated: RotationDecision | None = None
        """This iteration's rotation; None where it does not apply."""
        self._even = EvenShare()
        self._losses = Losses(loss)
        self._budget = PrefillBudget()
        self._scheduled: Standing[Schedule] | None = None
        self._plan: _Plan | None = None

    def never_waits(self) -> bool:
        return True

    def batch(self, state: SystemState) -> Batch:
        levels = self._levels(state)
        aged = replace(levels, running=self._overtaken.aged(state, levels.running))
        self._rotated = None
        if len(state.running) and self._rotation.applies(state, self._pausing):
            return self._rotate(state, aged)
        out = self._out_of_room(state, aged)
        admitted = self._admit(state, aged, int(aged.running[out].min(initial=LEVELS)))
        # A turn comes within a few steps whatever the level: nobody's age matters for those.
        turns = self._taking_turns(state, levels, out, queue=len(admitted) < len(state.waiting))
        return Batch(admitted, pause=tuple(sorted([*turns, *out.tolist()])))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        if self._rotated is not None:
            return self._rotated.ratios(self._even)
        if batch.pause and self._evicted_of is not None:
            none = np.zeros(len(batch.admit), np.int64)
            return ratios_for(state, batch, np.concatenate((self._evicted_of, none)))
        return ratios_for(state, batch, self._evicted(state, batch))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return plan_split(state, plan)

    def _rotate(self, state: SystemState, levels: Levels) -> Batch:
        """More requests run than memory holds, the less urgent in turn."""
        self._budget.note(state, levels.several)
        self._losses.note(state.busy_s, 0.0)
        self._scheduled = None
        order = levels.order
        if len(order):
            order = affordable(state, levels, self._budget, order)[:MOST_ADMITTED]
        if len(order):
            head = levels.waiting[order] == levels.waiting[order[0]]
            order = paced(state, levels, self._budget, order[np.logical_and.accumulate(head)])
        line = replace(state, waiting=select(state.waiting, order))
        urgency = Urgency(levels.running, levels.waiting[order])
        self._rotated = self._rotation.decide(line, urgency, queue=len(state.waiting))
        self._overtaken.note(state.running.request_id[self._rotated.paused])
        batch = self._rotated.batch()
        return replace(batch, admit=tuple(order[: len(batch.admit)].tolist()))

    def _levels(self, state: SystemState) -> Levels:
        ids = state.running.request_id, state.waiting.request_id
        if self._ranked is None or not self._ranked.holds(*ids):
            self._ranked = Standing(rank_levels(state.running, state.waiting), *ids)
            self._refused = None
        return self._ranked.answer

    def _out_of_room(self, state: SystemState, levels: Levels) -> IntArray:
        """Positions of the running requests that pause until there is room."""
        self._evicted_of = None
        if not len(state.running):
            return np.zeros(0, np.int64)
        paused = self._pausing.paused(state, levels.running)
        if len(paused):
            self._evicted_of = self._pausing.evicted(state, len(paused))
        self._overtaken.note(state.running.request_id[paused])
        return paused

    def _admit(self, state: SystemState, levels: Levels, below: int) -> tuple[int, ...]:
        self._budget.note(state, levels.several)
        if len(state.waiting) == 0 or len(state.running) >= state.max_running:
            return ()
        given = (*_bounds(state), below)
        if self._refused is not None and self._refused.holds(given):
            return ()
        admitted = admit(state, levels, self._budget, below)
        refused = Standing(None, given, iterations=ASK_AGAIN)
        self._refused = refused if admitted == () else None
        return admitted or ()

    def _taking_turns(
        self, state: SystemState, levels: Levels, out: IntArray, queue: bool
    ) -> list[int]:
        """Positions of the running requests that pause for this step, so that others are faster.
        Those that are `out` pause anyway: they take nobody's turn, and cost no step anything.

        Args:
            queue: requests wait that cannot be admitted.
        """
        active = np.delete(np.arange(len(state.running)), out)
        part = replace(state, running=select(state.running, active)) if len(out) else state
        uncached, memory = part.running.uncached_tokens, state.memory
        standing, given = self._scheduled, (levels, out, uncached, queue)
        self._losses.note(state.busy_s, 0.0 if standing is None else standing.answer.loss)
        if standing is None or not standing.holds(*given):
            scarce = memory.device_free_tokens < SCARCE * memory.device_tokens
            pressure = queue or scarce or len(out) > 0 or bool(uncached.any())
            allowed = self._losses.allowed, self._losses.for_slo
            schedule = build(part, levels.running[active], pressure, *allowed)
            standing = Standing(schedule, *given, iterations=ASK_AGAIN)
            self._scheduled = standing
        paused: list[int] = active[list(standing.answer.paused(part))].tolist()
        return paused

    def _evicted(self, state: SystemState, batch: Batch) -> IntArray | None:
        """n_i of each running and each admitted request; None if all is cached. Where nobody is
        more urgent it is shared evenly, as while some pause: to go from one division to another
        moves KV for nothing."""
        if len(np.unique(self._levels_of(state, batch))) <= 1:
            return self._even.evicted(state, batch, Candidates.of(state, batch.admit))
        if batch.admit or not _still_good(state, self._plan):
            candidates = Candidates.of(state, batch.admit)
            block = state.memory.block_tokens
            need = _need(state, candidates.tokens, candidates.shared, GROWTH_STEPS)
            most = min(state.memory.max_restored_tokens, int(candidates.evictable.sum()))
            need = int(min(need, most)) // block * block
            self._plan = self._planned(state, batch, candidates, need) if need > 0 else None
        return None if self._plan is None else self._plan.evicted

    def _planned(
        self, state: SystemState, batch: Batch, candidates: Candidates, need: int
    ) -> _Plan:
        plan = self._plan
        if plan is not None and plan.is_near(candidates, need):
            costs = replace(plan.costs, limit=candidates.evictable)
            optimum, solved = plan.optimum, plan.solved_need
        else:
            costs = EvictionCosts.of(state, candidates, self._weights(state, batch), need)
            optimum, solved = self._program.solve(costs, need), need
        evicted = whole_blocks(costs, optimum, need, state.memory.block_tokens)
        return _Plan(candidates, costs, optimum, solved, evicted)

    def _weights(self, state: SystemState, batch: Batch) -> FloatArray:
        requests = running_and(state, batch.admit)
        level = self._levels_of(state, batch)
        return keep_weights(level, requests.tpot_slo_s, requests.arrival_s)

    def _levels_of(self, state: SystemState, batch: Batch) -> IntArray:
        """Of the running and these admitted requests."""
        levels = self._levels(state)
        return np.append(levels.running, levels.waiting[np.array(batch.admit, np.int64)])


@dataclass(frozen=True, eq=False)
class _Plan:
    """An answer to the ratio question, and what it came from."""

    candidates: Candidates
    """The requests that it is for."""
    costs: EvictionCosts
    optimum: FloatArray
    """The program's n_i for a need of"""
    solved_need: int
    """so many tokens."""
    evicted: IntArray
    """n_i in whole blocks, for the latest need."""

    def is_for(self, running: Requests) -> bool:
        """Whether it is for these requests, with nothing more of them shared."""
        return np.array_equal(self.candidates.request_id, running.request_id) and np.array_equal(
            self.candidates.shared, running.shared_tokens
        )

    def is_near(self, candidates: Candidates, need: int) -> bool:
        """Whether the optimum is of the same requests and of a need near this one."""
        same = np.array_equal(self.candidates.request_id, candidates.request_id)
        return same and abs(need - self.solved_need) <= DRIFT * self.solved_need


def _bounds(state: SystemState) -> tuple[float, ...]:
    memory = state.memory
    return state.max_running, state.tpot_slo_s, memory.device_tokens, memory.max_restored_tokens


def _need(state: SystemState, tokens: IntArray, shared: IntArray, steps: int) -> float:
    """Σ n_i that memory lacks in so many steps, in whole blocks."""
    block = state.memory.block_tokens
    blocks = int(((tokens + (block - 1 + steps)) // block).sum()) + int((-shared // block).sum())
    short = blocks * block + unowned_tokens(state) - state.memory.device_tokens
    return float(to_evict(state.memory, short))


def _still_good(state: SystemState, plan: _Plan | None) -> bool:
    """Whether what was planned for the running requests covers the next step's need as far as
    it can be covered, and leaves no more room than they may need for a new block each."""
    running, memory = state.running, state.memory
    least = _need(state, running.tokens, running.shared_tokens, 1)
    if plan is None:
        return least <= 0
    if not plan.is_for(running):
        return False
    total = int(plan.evicted.sum())
    if least <= total:
        room = (len(plan.evicted) + 1) * memory.block_tokens
        return (total - least) * gained(memory) <= room
    most = int(evictable_tokens(running, memory.block_tokens).sum())
    return total > min(most, memory.max_restored_tokens) - memory.block_tokens
