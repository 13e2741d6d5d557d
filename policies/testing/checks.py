"""The conformance kit's checks: one function each, which raises `BrokenRuleError`, an
`AssertionError`, on a policy that breaks the rule, and `DoesNotApplyError` where it has no say."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies.base import (
    NO_GROWTH,
    Batch,
    EndedRequest,
    Policy,
    Ratios,
    SystemState,
    WorkSplit,
)
from ellm_sgl.policies.checks import checked_answers
from ellm_sgl.policies.planned import planned_tokens, select, step_work
from ellm_sgl.policies.testing.generate import Size, random_state
from ellm_sgl.policies.testing.starvation import SCENES, Server
from ellm_sgl.policies.testing.states import (
    Described,
    extremes,
    generated,
    missing_tokens,
    some_ratios_fit,
    with_ample_memory,
    with_memory,
    with_room,
)

Answers = tuple[Batch, Ratios, WorkSplit]
Factory = Callable[[], Policy]
"""A class, or whatever else makes a fresh policy without arguments."""
STATES = 60
"""Generated states per check, unless the caller says otherwise."""
BUSY = Size(running=256, waiting=1024)
TIMED_STATES = 20
HOPELESS = 20.0
"""Times the budget; slower policies are not put through the other checks."""
MEMORY_STEPS = (1 / 4, 1 / 2, 3 / 4, 1.0, 2.0)
"""Device memory in the monotonicity check, as shares of what all requests need."""
UNSEEN = 10**9
"""A request that no policy has been asked about."""
PATIENCE_S = 600.0
"""Simulated seconds within which a request has to get its first, or its next, token."""
SCENE_S = 900.0


class BrokenRuleError(AssertionError):
    """A rule that was broken; the message says how, and on which state."""


class TooSlowError(BrokenRuleError):
    """The answers come late; `hopeless` if so late that no other check is worth the wait."""

    def __init__(self, message: str, hopeless: bool) -> None:
        super().__init__(message)
        self.hopeless = hopeless


class DoesNotApplyError(Exception):
    """The check is not for this policy; the message says why."""


@dataclass(frozen=True)
class Subject:
    """The policy under test, and how thoroughly to test it."""

    make: Factory
    """Makes a new instance."""
    count: int = STATES
    """Generated states per check."""
    budget_ms: float | None = None
    """Most milliseconds for the three answers, in the median; None: not timed."""

    @classmethod
    def of(cls, policy: Policy | Factory, count: int, budget_ms: float | None) -> Subject:
        """Of what a caller of the kit may give; see `conformance.examine`."""
        if isinstance(policy, Policy):
            return cls(lambda: copy.deepcopy(policy), count, budget_ms)
        return cls(policy, count, budget_ms)

    def states(self) -> Iterator[Described]:
        """Generated states, then the extremes."""
        return chain(generated(self.count), extremes())


class _StepSecondsOnly(LatencyModel):
    """A latency model that a policy may use as it may: it predicts, and refuses to learn."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model

    def step_seconds(self, work: StepWork) -> FloatArray:
        return self._model.step_seconds(work)

    def observe(self, work: StepWork, seconds: float) -> None:
        raise BrokenRuleError("it calls latency.observe, which is the control loop's")


def answers_in_time(subject: Subject) -> None:
    """The median over different busy states, each new to the policy."""
    if subject.budget_ms is None:
        raise DoesNotApplyError("no budget_ms given")
    policy, rng = subject.make(), np.random.default_rng(0)
    took_ms: list[float] = []
    for _ in range(TIMED_STATES):
        state = random_state(rng, BUSY, exact_size=True)
        start = time.perf_counter()
        _ask(policy, state)
        took_ms.append((time.perf_counter() - start) * 1e3)
        if sum(took_ms) > 10 * HOPELESS * subject.budget_ms:
            break
    median = float(np.median(took_ms))
    if median > subject.budget_ms:
        raise TooSlowError(
            f"{median:.3g} ms for the three answers in the median of {len(took_ms)} states, the "
            f"budget is {subject.budget_ms:g} ms: 256 running, 1024 waiting",
            hopeless=median > HOPELESS * subject.budget_ms,
        )


def answers_are_valid(subject: Subject) -> None:
    """Answers pass `ellm_sgl.policies.checks`; extremes are also put to a new instance."""
    veteran = subject.make()
    for told, state in subject.states():
        with _on(told):
            checked_answers(veteran, state)
    for told, state in extremes():
        with _on(f"{told}, the first one that it is asked about"):
            checked_answers(subject.make(), state)


def state_is_left_alone(subject: Subject) -> None:
    policy = subject.make()
    for told, state in subject.states():
        with _on(told):
            before = _columns(state)
            _ask(policy, replace(state, latency=_StepSecondsOnly(state.latency)))
            for name, column in _columns(state).items():
                if column[1] or not np.array_equal(column[0], before[name][0], equal_nan=True):
                    raise BrokenRuleError(f"it changed state.{name}, or made it writable")


def same_history_same_answers(subject: Subject) -> None:
    """Two instances, whatever the global random generators have been through meanwhile."""
    first, second = subject.make(), subject.make()
    saved, saved_numpy = random.getstate(), np.random.get_state()
    try:
        for told, state in subject.states():
            with _on(told):
                answers = []
                for seed, policy in enumerate((first, second)):
                    random.seed(seed)
                    np.random.seed(seed)
                    answers.append(_ask(policy, state))
                if difference := _difference(*answers):
                    raise BrokenRuleError(f"two instances with one history disagree: {difference}")
    finally:
        random.setstate(saved)
        np.random.set_state(saved_numpy)


def more_memory_never_less_cached(subject: Subject) -> None:
    """Memory grows while the same requests run; nobody waits, so that it cannot admit more."""
    policy = subject.make()
    for told, state in subject.states():
        if len(state.running) == 0:
            continue
        slack = state.memory.block_tokens * len(state.running)  # what rounding may move about
        with _on(f"{told}, nobody waiting"):
            totals = [_uncached_target(policy, with_memory(state, step)) for step in MEMORY_STEPS]
            for (less, before), (more, after) in pairwise(zip(MEMORY_STEPS, totals, strict=True)):
                if after > before + slack:
                    raise BrokenRuleError(
                        f"with {more:.0%} of the memory needed it leaves {after:,.0f} tokens "
                        f"uncached, with {less:.0%} only {before:,.0f}"
                    )


def targets_fit_the_device(subject: Subject) -> None:
    """Of running requests, wherever some ratios would fit and the pool cannot grow. Asked of
    policies that adapt."""
    if not _adapts(subject):
        raise DoesNotApplyError(
            "its ratios do not depend on memory: the server's eviction makes them fit"
        )
    policy = subject.make()
    for told, state in subject.states():
        if not some_ratios_fit(state):
            continue
        state = replace(state, memory=replace(state.memory, growth=NO_GROWTH))
        with _on(told):
            batch, ratios, _ = checked_answers(policy, state)
            targets = planned_tokens(state.running, ratios.running, state.memory.block_tokens)
            restored = float(np.delete(targets, list(batch.pause)).sum())
            missing = missing_tokens(state, float(targets.sum()), restored)
            if missing > 0:
                raise BrokenRuleError(
                    f"its targets leave {targets.sum():,} tokens uncached, {missing:,.0f} device "
                    "tokens too few"
                )
            if restored > state.memory.max_restored_tokens:
                raise BrokenRuleError(
                    f"its targets leave {restored:,} tokens for one step to restore, which can "
                    f"restore at most {state.memory.max_restored_tokens:,}"
                )


def idle_without_pressure(subject: Subject) -> None:
    """What `Policy.idle_without_pressure` promises, where memory has room for just that."""
    if not subject.make().idle_without_pressure():
        raise DoesNotApplyError("it does not say so (Policy.idle_without_pressure)")
    policy = subject.make()
    for told, state in subject.states():
        if len(state.running) == 0:
            continue
        checked_answers(policy, state)  # whatever came before must not matter,
        with _on(f"{told}, nobody waiting, room for a block more of each"):
            checked_answers(policy, with_ample_memory(state))  # but who paused may resume first
            batch, ratios, _ = checked_answers(policy, with_room(state))
            if batch.pause or ratios.running.any():
                raise BrokenRuleError(
                    f"it says that it is idle without pressure, but pauses {len(batch.pause)} and "
                    f"leaves {np.count_nonzero(ratios.running)} of {len(state.running)} not fully "
                    "cached"
                )


def hears_of_the_end(subject: Subject) -> None:
    """Told that requests have ended, also one that it has never seen, it raises nothing, and goes
    on answering about the others; nor does it when it is closed."""
    for told, state in subject.states():
        policy = subject.make()
        with _on(f"{told}, of which every other running request then ends"):
            checked_answers(policy, state)
            ids = state.running.request_id.tolist()
            for request_id, aborted in ((i, i % 3 == 0) for i in (*ids[::2], UNSEEN)):
                policy.ended(EndedRequest(request_id, output_tokens=5, aborted=aborted))
            rest = select(state.running, np.arange(len(ids))[1::2])
            checked_answers(policy, replace(state, running=rest))
            policy.close()


def nobody_starves(subject: Subject) -> None:
    """In the scenes of `starvation` everybody gets a token every ten minutes."""
    for scene in SCENES:
        server = Server(subject.make(), scene)
        end_s = server.now_s + SCENE_S
        with _on(f"simulated scene: {scene.name}"):
            while server.now_s < end_s:
                server.step()
                waited_s, request = server.longest_wait()
                if waited_s > PATIENCE_S:
                    what = "next" if request in server.running else "first"
                    raise BrokenRuleError(
                        f"request {request.request_id} ({request.tokens} tokens, priority "
                        f"{request.kind.priority}) has waited {waited_s:.0f} s for its {what} "
                        f"token, and {server.arrived} others came; let waited_s count"
                    )


TIMED = "answers-in-time"
"""The check that needs a budget, and a quiet machine."""
CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        answers_in_time,
        answers_are_valid,
        state_is_left_alone,
        same_history_same_answers,
        more_memory_never_less_cached,
        targets_fit_the_device,
        idle_without_pressure,
        hears_of_the_end,
        nobody_starves,
    )
}
"""Every check by name, in the order in which they run."""


@contextmanager
def _on(told: str) -> Iterator[None]:
    """Adds the state to whatever is raised while it is looked at."""
    try:
        yield
    except Exception as error:
        raise BrokenRuleError(f"{told_of(error)}; {told}") from error


def told_of(error: Exception) -> str:
    return str(error) if isinstance(error, BrokenRuleError) else f"{type(error).__name__}: {error}"


def _ask(policy: Policy, state: SystemState) -> Answers:
    batch = policy.batch(state)
    ratios = policy.ratio(state, batch)
    return batch, ratios, policy.split(state, step_work(state, batch, ratios))


def _difference(first: Answers, second: Answers) -> str | None:
    if first[0] != second[0]:
        return f"{first[0]} and {second[0]}"
    for name in ("running", "admitted"):
        a, b = getattr(first[1], name), getattr(second[1], name)
        if not np.array_equal(a, b, equal_nan=True):
            where = int(np.argmax(a != b))
            return f"{name} ratio {where} is {a[where]:.6g} and {b[where]:.6g}"
    return f"{first[2]} and {second[2]}" if first[2] != second[2] else None


def _columns(state: SystemState) -> dict[str, tuple[Any, bool]]:
    """A copy of every column, and whether the original is writable."""
    return {
        f"{part}.{name}": (column.copy(), column.flags.writeable)
        for part in ("running", "waiting")
        for name, column in vars(getattr(state, part)).items()
    }


def _uncached_target(policy: Policy, state: SystemState) -> float:
    """Σ r_i s_i of the running requests, before rounding."""
    _, ratios, _ = checked_answers(policy, state)
    return float((ratios.running * state.running.tokens).sum())


def _adapts(subject: Subject) -> bool:
    """Whether half the memory needed, and twice of it, ever make a difference to the ratios."""
    policy = subject.make()
    for told, state in subject.states():
        with _on(told):
            half = _uncached_target(policy, with_memory(state, 0.5))
            twice = _uncached_target(policy, with_memory(state, 2.0))
        if half != twice:
            return True
    return False
