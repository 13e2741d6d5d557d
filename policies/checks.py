"""Checks of a policy's answers, made before any of them is applied.

Tens of microseconds at 256 running and 1,024 waiting requests. What they let through, the server
can apply; whether it is wise is the policy's affair (see `ellm_sgl.policies.testing`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ellm_sgl.policies.base import ALL_THREADS, Batch, Policy, Ratios, SystemState, WorkSplit
from ellm_sgl.policies.planned import step_work
from ellm_sgl.policies.work_split import WARP

MAX_SWAP_LAYERS = 3
MAX_RECOMPUTE_LAYERS = 2


class InvalidAnswer(ValueError):  # noqa: N818 (what it is, not what it does)
    """An answer that cannot be applied; the message names the value and the remedy.

    Args:
        kind: what is wrong, in one word: "type", "shape", "nan", "range", "duplicate" or "stall".
            The server counts by it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def checked_answers(policy: Policy, state: SystemState) -> tuple[Batch, Ratios, WorkSplit]:
    """The three answers, each checked before the next question is asked.

    Raises:
        InvalidAnswer: one of them cannot be applied.
    """
    batch = policy.batch(state)
    check_batch(state, batch)
    ratios = policy.ratio(state, batch)
    check_ratios(state, batch, ratios)
    split = policy.split(state, step_work(state, batch, ratios))
    check_split(split)
    return batch, ratios, split


def check_batch(state: SystemState, batch: Batch) -> None:
    """Check the answer to the batch question.

    Raises:
        InvalidAnswer: not a `Batch` of tuples of positions; a position out of range, or given
            twice; every running request paused, or none admitted to an idle server, so that nothing
            would ever move.
    """
    if not isinstance(batch, Batch):
        raise _wrong_type("batch()", "a Batch", batch)
    _check_positions("admit", batch.admit, "waiting", len(state.waiting))
    _check_positions("pause", batch.pause, "running", len(state.running))
    if batch.pause and len(batch.pause) == len(state.running):
        raise InvalidAnswer(
            "stall",
            f"batch().pause names all {len(batch.pause)} running requests; let at least one run",
        )
    idle = len(state.running) == 0 and len(state.prefilling) == 0
    if idle and len(state.waiting) and not batch.admit:
        raise InvalidAnswer(
            "stall", "batch().admit is empty while nothing runs; admit at least one"
        )


def check_ratios(state: SystemState, batch: Batch, ratios: Ratios) -> None:
    """Check the answer to the ratio question; `batch` is one that passed its check.

    Raises:
        InvalidAnswer: not a `Ratios` of float arrays, one entry per running and per admitted
            request; an entry that is nan or outside of [0, 1).
    """
    if not isinstance(ratios, Ratios):
        raise _wrong_type("ratio()", "a Ratios", ratios)
    _check_array("running", ratios.running, len(state.running), "one entry per running request")
    _check_array(
        "admitted", ratios.admitted, len(batch.admit), "one entry per entry of batch.admit"
    )


def check_split(split: WorkSplit) -> None:
    """Check the answer to the split question.

    Raises:
        InvalidAnswer: not a `WorkSplit` of integers; l1 outside of 0 to 3, l2 of 0 to 2, both 0; δ
            not a multiple of 32 from 32 to 992.
    """
    if not isinstance(split, WorkSplit):
        raise _wrong_type("split()", "a WorkSplit", split)
    swap, recompute, delta = split.swap_layers, split.recompute_layers, split.delta
    for name, value in (("swap_layers", swap), ("recompute_layers", recompute), ("delta", delta)):
        if not _is_integer(type(value)):
            raise _wrong_type(f"split().{name}", "an integer", value)
    wrong = None
    if not 0 <= swap <= MAX_SWAP_LAYERS:
        wrong = f".swap_layers is {swap}; give l1 from 0 to {MAX_SWAP_LAYERS}"
    elif not 0 <= recompute <= MAX_RECOMPUTE_LAYERS:
        wrong = f".recompute_layers is {recompute}; give l2 from 0 to {MAX_RECOMPUTE_LAYERS}"
    elif swap + recompute == 0:
        wrong = " swaps 0 layers and recomputes 0 layers; give at least one of them"
    elif delta % WARP or not WARP <= delta <= ALL_THREADS - WARP:
        most = ALL_THREADS - WARP
        wrong = f".delta is {delta}; give a multiple of {WARP} from {WARP} to {most}"
    if wrong:
        raise InvalidAnswer("range", f"split(){wrong}")


def _check_positions(field: str, positions: Any, of: str, count: int) -> None:
    if not isinstance(positions, tuple):
        raise _wrong_type(f"batch().{field}", "a tuple of integers", positions)
    if not positions:
        return
    if not all(map(_is_integer, set(map(type, positions)))):
        value = next(p for p in positions if not _is_integer(type(p)))
        raise _wrong_type(f"an entry of batch().{field}", "an integer", value)
    for position in (min(positions), max(positions)):
        if not 0 <= position < count:
            raise InvalidAnswer(
                "range",
                f"batch().{field} has {position}; give positions in state.{of}, which has {count} "
                "entries (not request ids)",
            )
    if len(set(positions)) < len(positions):
        firsts = {p: i for i, p in reversed(list(enumerate(positions)))}
        twice = next(p for i, p in enumerate(positions) if firsts[p] < i)
        raise InvalidAnswer(
            "duplicate", f"batch().{field} has {twice} more than once; name each request once"
        )


def _check_array(field: str, array: Any, length: int, remedy: str) -> None:
    name = f"ratio().{field}"
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise _wrong_type(name, "a float array", array)
    if array.shape != (length,):
        raise InvalidAnswer("shape", f"{name} has shape {array.shape}; give ({length},), {remedy}")
    if length == 0 or (array.min() >= 0.0 and array.max() < 1.0):  # false for nan
        return
    nan = np.isnan(array)
    if nan.any():
        raise InvalidAnswer(
            "nan",
            f"{name}[{nan.argmax()}] is nan; note that tpot_s is nan before the second token, and "
            "that inf - inf is",
        )
    worst = ((array < 0.0) | (array >= 1.0)).argmax()
    raise InvalidAnswer(
        "range", f"{name}[{worst}] is {array[worst]:g}; give ratios of at least 0 and below 1"
    )


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _wrong_type(name: str, expected: str, value: object) -> InvalidAnswer:
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else repr(value)
    if len(found) > 80:
        found = f"{found[:80]}…"
    return InvalidAnswer(
        "type", f"{name} is {found} ({type(value).__name__}); return {expected} instead"
    )
