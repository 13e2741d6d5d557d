"""What is done in a step: a policy's answer, the safe one, or what it said last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ellm_sgl.engine.decision import FETCH_ALL
from ellm_sgl.policies import Batch, Ratios, SystemState, WorkSplit

STANDS_S = 1.0
"""Seconds for which the last answer of a policy that is late stands: longer than a busy machine
keeps a thread waiting. After that it is done without."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A policy's three answers to one state, or the safe ones."""

    batch: Batch
    ratios: Ratios
    split: WorkSplit


def safe_answer(state: SystemState) -> Answer:
    """Keeps all cached, fetches what the host has, and admits as SGLang does."""
    waiting = len(state.waiting)
    return Answer(
        Batch(admit=tuple(range(waiting))),
        Ratios(running=np.zeros(len(state.running)), admitted=np.zeros(waiting)),
        FETCH_ALL,
    )


def own(ratios: Any) -> Any:
    """A copy that the policy cannot change while it stands; what is none is left to be refused."""
    if not isinstance(ratios, Ratios):
        return ratios
    both = ratios.running, ratios.admitted
    if not all(isinstance(array, np.ndarray) for array in both):
        return ratios
    return Ratios(*(array.copy() for array in both))


def repeated(said: Answer, before: SystemState, state: SystemState) -> Answer | None:
    """The same for those that still run: others keep all cached, and nobody is admitted.

    Args:
        said: what was answered,
        before: and to which state.

    Returns:
        None if it is too old, or nobody would run.
    """
    ids, running = state.running.request_id, before.running.request_id
    pause = np.flatnonzero(np.isin(ids, running[list(said.batch.pause)]))
    if state.now_s - before.now_s > STANDS_S or len(pause) == len(ids):
        return None
    asked = np.append(running, before.waiting.request_id[list(said.batch.admit)])
    ratios = np.append(said.ratios.running, said.ratios.admitted)
    ratio_of = dict(zip(asked.tolist(), ratios.tolist(), strict=True))
    ratio = np.array([ratio_of.get(one, 0.0) for one in ids.tolist()])
    batch = Batch(admit=(), pause=tuple(pause.tolist()))
    return Answer(batch, Ratios(ratio, np.zeros(0)), said.split)
