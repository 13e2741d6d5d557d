"""Policies for tests of the server, found by it as those of an installed package."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from ellm_sgl.latency import StepWork
from ellm_sgl.policies import Batch, Policy, Ratios, SystemState, WorkSplit

_ENTRY_POINTS = """[ellm_sgl.policies]
faulty = scripted_policies:Faulty
turns = scripted_policies:Turns
holds = scripted_policies:Holds
"""


def install(folder: Path) -> dict[str, str]:
    """Put this module into `folder` as an installed package; the environment that finds it."""
    info = folder / "scripted_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "scripted_policies.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": str(folder)}


class Faulty(Policy):
    """Fails in the way that `how` names, at every second question, and keeps half otherwise.

    One that hangs does so for ever, and at once: in its constructor, or when first asked.
    """

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0
        if how == "hang when made":
            threading.Event().wait()

    def idle_without_pressure(self) -> bool:
        if self.how == "hang before any question":
            threading.Event().wait()
        return False

    def batch(self, state: SystemState) -> Batch:
        self.calls += 1
        fails = self.calls % 2 == 0
        everybody = tuple(range(len(state.waiting)))
        if self.how == "hang":
            threading.Event().wait()
        if fails and self.how == "raise":
            raise RuntimeError("out of ideas")
        if fails and self.how == "sleep":
            time.sleep(1.0)
        if fails and self.how == "b = -1":
            return Batch(admit=(-1,))
        if self.how == "nobody is admitted":
            return Batch(admit=())
        if fails and self.how == "all pause":
            return Batch(admit=(), pause=tuple(range(len(state.running))))
        return Batch(admit=everybody)

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        r = 0.5
        if self.calls % 2 == 0:
            r = {"nan": np.nan, "r = 2": 2.0}.get(self.how, r)
        return Ratios(np.full(len(state.running), r), np.full(len(batch.admit), r))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return WorkSplit(swap_layers=0, recompute_layers=1, delta=512)


class Turns(Policy):
    """Requests pause in turn: of `of` steps each runs in `of` - 1."""

    def __init__(self, of: int = 3, ratio: float = 0.0) -> None:
        self.of, self.r, self.calls = of, ratio, 0

    def batch(self, state: SystemState) -> Batch:
        self.calls += 1
        turn = (state.running.request_id + self.calls) % self.of == 0
        pause = tuple(np.flatnonzero(turn).tolist())
        if len(pause) == len(state.running):
            pause = ()
        return Batch(admit=tuple(range(len(state.waiting))), pause=pause)

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        return Ratios(np.full(len(state.running), self.r), np.full(len(batch.admit), self.r))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return WorkSplit(swap_layers=0, recompute_layers=1, delta=512)


class Holds(Policy):
    """Requests that may have exactly `tokens` output tokens pause for every step in which `others`
    other requests run, without `ratio` of their KV. Takes its time, so that those still run when
    the test, on a machine that is busy, has seen who paused and has sent the next request."""

    def __init__(self, tokens: int, others: int = 1, ratio: float = 0.0) -> None:
        self.tokens, self.others, self.r = tokens, others, ratio

    def batch(self, state: SystemState) -> Batch:
        time.sleep(0.01)
        pause = tuple(np.flatnonzero(self._paused(state)).tolist())
        return Batch(admit=tuple(range(len(state.waiting))), pause=pause)

    def ratio(self, state: SystemState, batch: Batch) -> Ratios:
        ratios = np.where(self._paused(state), self.r, 0.0)
        return Ratios(ratios, np.zeros(len(batch.admit)))

    def split(self, state: SystemState, plan: StepWork) -> WorkSplit:
        return WorkSplit(swap_layers=0, recompute_layers=1, delta=512)

    def _paused(self, state: SystemState) -> np.ndarray:
        held: np.ndarray = state.running.max_new_tokens == self.tokens
        return held & (np.count_nonzero(~held) >= self.others)
