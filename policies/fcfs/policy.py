"""First come, first served: the batch size and the ratio that decode most tokens per second."""

from __future__ import annotations

import numpy as np

from ellm_sgl.config.ranges import shown
from ellm_sgl.latency import StepWork
from ellm_sgl.policies.base import Batch, Policy, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.fcfs.growth import inflated
from ellm_sgl.policies.fcfs.relaxation import Relaxation
from ellm_sgl.policies.pausing.choice import Pausing
from ellm_sgl.policies.pausing.rotation import Rotation, RotationDecision
from ellm_sgl.policies.problem.batch_size import BatchProblem
from ellm_sgl.policies.problem.candidates import (
    Candidates,
    ratios_for,
    ratios_of,
    step_limit_s,
)
from ellm_sgl.policies.problem.even_share import HOLD, EvenShare
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.standing import Standing
from ellm_sgl.policies.problem.under_way import as_running
from ellm_sgl.policies.work_split import plan_split

SOLVE_EVERY = 16
"""Iterations after which the batch question is solved again though nothing else has changed. Till
then a refusal stands while a step may not take clearly longer, so many requests while it may take
as long."""

NOBODY = np.zeros(0)


class Fcfs(Policy):
    """The eLLM paper's Eqs. (1) to (5): max b / T(b, r) within SLO and memory.

    Who runs: the running requests and a prefix of the waiting ones.

    - All are admitted that fit, within the SLO, without restoring anything: refusing them would
      only put them off. b / T decides whether more are, at the price of restoring or pausing.
    - That is asked not only of now but until all have ended, by what is known of output lengths
      (`problem.forecast`), and the mean step until then must keep the SLO: the paper takes current
      lengths and the next step, and so admits requests that soon push each other out.
    - Where memory no longer holds those that run, some of them pause, their KV evicted, if more
      tokens per second are decoded so than by restoring part of everyone in every step: those
      furthest ahead of their SLO; without one, the last.
      Otherwise running requests stay, also where memory or SLO admit no answer; then nobody
      is admitted. A request that would be alone is, whatever it needs.

    How much of each stays cached: the same share ρ of what can be evicted of each (its blocks but
    shared ones and the last) is evicted, the least share that fits; r_i = ρ e_i / s_i in whole
    blocks, hence ρ = r but for the last block where nothing is shared. The share rises only when
    it must, and falls when `HOLD` less would do, so that a steady load gives a steady ratio.
    There is no slack on top: every evicted block is computed again in every step.

    Where the pool can grow for less than restoring costs, all that is decided as if it had
    (`growth.inflated`).

    Args:
        forecast: whether to look ahead; False is the paper's problem.
        pause: whether running requests may pause; False is the paper's problem.
        solver: "scan" looks at every batch size, which is exact. "slsqp", for the paper's problem
            alone, is the paper's way: a local optimum of the continuous relaxation, from the last
            one on, then the best of the whole batch sizes near it.
        rotate: where device and host hold all that run, and TPOT SLOs are twice as long as a step
            of a device full of newcomers or longer, more requests run than memory holds, and rotate
            on the device (`pausing.rotation`); needs both of the above.
    """

    def __init__(
        self,
        forecast: bool = True,
        pause: bool = True,
        solver: str = "scan",
        rotate: bool = True,
    ) -> None:
        for name, value in (("forecast", forecast), ("pause", pause), ("rotate", rotate)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {shown(value)}")
        if solver not in ("scan", "slsqp"):
            raise ValueError(f'solver must be "scan" or "slsqp", got {shown(solver)}')
        if forecast and solver == "slsqp":
            raise ValueError('solver "slsqp" is for the paper\'s problem: give forecast false, too')
        self._forecasts = forecast
        self._pausing = Pausing() if pause else None
        self._solve = BatchProblem.solve if solver == "scan" else Relaxation().solve
        self._even = EvenShare()
        self._answered: Standing[tuple[int, float]] | None = None
        """How many may be admitted, and the limit on a step's time. They may wait many steps for
        the server's own admission; and if nobody may, running requests only grow: it gets no
        easier."""
        self._rotation = Rotation() if rotate and forecast and pause else None
        self._rotated: RotationDecision | None = None
        """This iteration's rotation; None where it does not apply."""

    def idle_without_pressure(self) -> bool:
        return True

    def never_waits(self) -> bool:
        return True

    def batch(self, state: SystemState) -> Batch:
        state = inflated(state)
        count = len(state.running)
        self._rotated = None
        if (
            count
            and self._rotation
            and self._pausing
            and self._rotation.applies(state, self._pausing)
        ):
            self._rotated = self._rotation.decide(state)
            return self._rotated.batch()
        if count and self._pausing is not None:
            paused = self._pausing.paused(state)
            if len(paused):
                return Batch(admit=(), pause=tuple(paused.tolist()))
        state = as_running(state)
        most = min(len(state.waiting), state.max_running - len(state.running))
        return Batch(admit=tuple(range(self._admitted(state, most) if most > 0 else 0)))

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        state = inflated(state)
        if self._rotated is not None:
            return self._rotated.ratios(self._even)
        if batch.pause and self._pausing is not None:
            evicted = self._pausing.evicted(state, len(batch.pause))
            return Ratios(ratios_of(evicted, state.running.tokens), NOBODY)
        shared = self._even.evicted(state, batch, Candidates.of(state, batch.admit))
        return ratios_for(state, batch, shared, eventually=self._forecasts)

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return plan_split(state, plan)

    def _admitted(self, state: SystemState, most: int) -> int:
        """How many of up to `most` waiting requests may be admitted."""
        limit_s = np.inf if self._forecasts else step_limit_s(state)
        if self._answered is not None:
            admitted, before_s = self._answered.answer
            if self._answered.holds(*_question(state, admitted)) and (
                limit_s >= before_s if admitted else limit_s <= before_s + HOLD * abs(before_s)
            ):
                return admitted
        if self._forecasts:
            size = Forecast.of(state, most).solve(may_pause=self._pausing is not None)
        else:
            size = self._solve(BatchProblem.of(state, most))
        admitted = size - len(state.running)
        self._answered = None
        if admitted == 0 or self._forecasts:
            given = _question(state, admitted)
            self._answered = Standing((admitted, limit_s), *given, iterations=SOLVE_EVERY)
        return admitted


def _question(state: SystemState, admitted: int) -> tuple[object, ...]:
    """What it depends on how many are admitted: who runs, who is admitted and the next one behind
    them, places, the server's SLO and memory."""
    memory = state.memory
    return (
        state.running.request_id,
        state.waiting.request_id[: admitted + 1],
        (state.max_running, state.tpot_slo_s, memory.device_tokens, memory.max_restored_tokens),
    )
