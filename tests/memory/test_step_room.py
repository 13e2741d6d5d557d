"""What a step's activations take, and how many rows there is memory for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.memory import PromptRoom
from ellm_sgl.memory.step_room import Activations, StepRoom
from tests.engine.scene import BLOCK, Scene

KNOWN = Activations(row_bytes=100.0, logit_row_bytes=1000.0, step_bytes=5000.0)
STEPS = [(1, 1), (16, 16), (256, 1), (1024, 1), (160, 4)]
SIZES = st.integers(1, 10_000)


def room(left: float, activations: Activations = KNOWN) -> StepRoom:
    made = StepRoom(activations, BLOCK)
    made.left_bytes = left
    return made


def test_a_line_is_found_again() -> None:
    found = Activations.fit([(*step, KNOWN.bytes_of(*step)) for step in STEPS])
    assert found.row_bytes == pytest.approx(100, rel=0.01)
    assert found.logit_row_bytes == pytest.approx(1000, rel=0.01)
    assert found.step_bytes == pytest.approx(5000, rel=0.01)


@given(st.lists(st.tuples(SIZES, SIZES, st.integers(1, 10**12)), min_size=1, max_size=9))
def test_nothing_that_was_measured_lies_above_the_line(
    measured: list[tuple[int, int, int]],
) -> None:
    found = Activations.fit(measured)
    for rows, logit_rows, peak in measured:
        assert found.bytes_of(rows, logit_rows) >= peak * (1 - 1e-9)


@given(st.floats(0, 1e9), st.integers(0, 500), st.integers(0, 3000))
def test_a_step_has_all_of_its_memory_or_does_not_begin(
    left: float, decoding: int, prompt_rows: int
) -> None:
    step = room(left)
    step.prompt_rows = prompt_rows
    rows = step.restorable(decoding)
    assert rows >= BLOCK  # something always goes on
    if rows > BLOCK:
        assert KNOWN.bytes_of(decoding + prompt_rows + int(rows), decoding) <= left


@given(st.floats(0, 1e7), st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=9))
def test_prompts_of_a_step_share_what_there_is(
    left: float, prompts: list[tuple[int, bool]]
) -> None:
    step = room(left)
    some = PromptRoom(math.inf, 0, BLOCK, step, step.for_prompts(decoding=3, recomputed=5))
    taken: float = KNOWN.bytes_of(3 + 5, 3)
    begun = 0
    for tokens, logits in prompts:
        rows = min(tokens, some.rows(logits))
        assert rows >= (0 if begun else min(BLOCK, tokens))
        if rows:
            some.compute(int(rows), logits)
            taken += KNOWN.bytes_of_rows(int(rows), int(rows) if logits else 0)
            begun += 1
    # One prompt's first block may come on top, and a row of logits for each.
    allowance = KNOWN.bytes_of_rows(BLOCK, BLOCK) * (begun > 0)
    assert taken <= max(left, KNOWN.bytes_of(8, 3)) + allowance


def test_without_a_bound_all_is_as_if_nothing_took_memory() -> None:
    assert room(math.inf).restorable(100) == math.inf
    assert room(1000, Activations()).restorable(100) == math.inf
    assert PromptRoom(math.inf, 0, BLOCK).rows(logits=True) == math.inf


def test_where_little_is_left_fewer_tokens_are_left_to_be_recomputed() -> None:
    scene = Scene(room=20, ratios=0.5, max_restored=1000)
    scene.request(0, tokens=16 * BLOCK)
    scene.elastic.room = room(KNOWN.bytes_of(1 + 3 * BLOCK, 1))
    assert scene.elastic.memory_state([0]).max_restored_tokens == 3 * BLOCK
    scene.elastic.bring_to_ratios([0], [0.5])
    assert scene.uncached() == [3 * BLOCK]
    assert scene.elastic.fits_one_step([0])
    scene.elastic.room.prompt_rows = BLOCK
    scene.request(1, tokens=1)
    assert not scene.elastic.fits_one_step([0, 1])
    assert scene.elastic.fits_one_step([0]), "SGLang would end the last one"
