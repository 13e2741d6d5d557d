"""What is done in a step: a policy's answer, the safe one, or what it said last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ellm_sgl.policies import Batch, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.base import FloatArray, IntArray

STANDS_S = 1.0
"""Seconds for which the last answer of a policy that is late stands: longer than a busy machine
keeps a thread waiting. After that it is done without."""
SAFE_SPLIT = WorkSplit(swap_layers=0, recompute_layers=1, delta=512)


@dataclass(frozen=True, eq=False)
class Answer:
    """A policy's three answers to one state, or the safe ones."""

    batch: Batch
    ratios: Ratios
    split: WorkSplit


def safe_answer(state: SystemState) -> Answer:
    """Keeps all cached, and admits as SGLang does."""
    waiting = len(state.waiting)
    return Answer(
        Batch(admit=tuple(range(waiting))),
        Ratios(running=np.zeros(len(state.running)), admitted=np.zeros(waiting)),
        SAFE_SPLIT,
    )


@dataclass(frozen=True, eq=False)
class LastWord:
    """An answer by requests, so that it can stand for a while."""

    at_s: float
    """`SystemState.now_s`."""
    request_id: IntArray
    """Those that ran or were admitted, ascending,"""
    ratio: FloatArray
    """and their ratios."""
    paused: IntArray
    """Ids."""
    split: WorkSplit

    @classmethod
    def of(cls, state: SystemState, answer: Answer) -> LastWord:
        """`state`: what was answered."""
        running, batch = state.running.request_id, answer.batch
        ids = np.append(running, state.waiting.request_id[list(batch.admit)])
        order = np.argsort(ids)
        return cls(
            at_s=state.now_s,
            request_id=ids[order],
            ratio=np.append(answer.ratios.running, answer.ratios.admitted)[order],
            paused=running[list(batch.pause)],
            split=answer.split,
        )

    def answer(self, state: SystemState) -> Answer | None:
        """The same for those that still run: others keep all cached, and nobody is admitted. None
        if it is too old, or nobody would run."""
        ids = state.running.request_id
        pause = np.flatnonzero(np.isin(ids, self.paused))
        if state.now_s - self.at_s > STANDS_S or len(pause) == len(ids):
            return None
        ratio = np.zeros(len(ids))
        if len(self.request_id):
            at = np.minimum(np.searchsorted(self.request_id, ids), len(self.request_id) - 1)
            ratio = np.where(self.request_id[at] == ids, self.ratio[at], 0.0)
        batch = Batch(admit=(), pause=tuple(pause.tolist()))
        return Answer(batch, Ratios(ratio, np.zeros(0)), self.split)
