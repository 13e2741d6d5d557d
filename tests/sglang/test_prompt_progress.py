"""What is told of a long prompt while it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies import StepReport
from ellm_sgl.sglang.prompt_progress import RECENT_S, describe_progress

CHUNK = 64


class Quadratic(LatencyModel):
    """A step takes 1 ms, and 1 µs for each (row, token) pair of a prompt."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        return np.asarray(0.001 + 1e-6 * np.asarray(work.prefill_pairs, np.float64))

    def observe(self, work: StepWork, seconds: float) -> None:
        raise AssertionError("nothing was measured here")


MODEL = Quadratic()


def chunk_at(begin: int, slower: float = 1.0) -> StepReport:
    """A step that took so many times what was predicted."""
    pairs = CHUNK * (begin + (CHUNK + 1) / 2)
    work = StepWork(0, 0, prefill_rows=CHUNK, prefill_pairs=pairs)
    predicted_s = float(MODEL.step_seconds(work))
    return StepReport(work, slower * predicted_s, predicted_s)


@pytest.mark.parametrize("most", [CHUNK, 4096])
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_is_left_takes_as_long_as_predicted_and_observed(slower: float, most: int) -> None:
    """All steps of a prompt of 1,024 tokens, looked at while the fifth is computed; memory may
    have kept them short."""
    steps = [chunk_at(begin, slower) for begin in range(0, 1024, CHUNK)]
    told = describe_progress(320, 1024, CHUNK, most, reversed(steps[:4]), MODEL)
    assert told["done"] == 320
    assert told["left_ms"] == pytest.approx(1e3 * sum(step.seconds for step in steps[5:]))
    assert told["tokens_per_s"] == pytest.approx(256 / sum(step.seconds for step in steps[:4]))


def test_steps_that_decode_in_between_slow_it_down() -> None:
    decode = StepReport(StepWork(8, 800), 0.010, 0.010)
    alone, beside = [chunk_at(64), chunk_at(0)], [decode, chunk_at(64), decode, chunk_at(0)]
    told = [describe_progress(192, 1024, CHUNK, CHUNK, steps, MODEL) for steps in (alone, beside)]
    took = [sum(step.seconds for step in steps) for steps in (alone, beside)]
    assert told[1]["left_ms"] == pytest.approx(told[0]["left_ms"] * took[1] / took[0])


def test_only_what_happened_of_late_counts() -> None:
    slow = StepReport(chunk_at(0).work, 100.0, chunk_at(0).predicted_s)
    recent = [chunk_at(0)] * (int(RECENT_S / chunk_at(0).seconds) + 2)
    done = CHUNK * (len(recent) + 5)
    told = describe_progress(done, done + CHUNK, CHUNK, CHUNK, [*recent, slow], MODEL)
    assert told["left_ms"] == pytest.approx(1e3 * chunk_at(done).seconds)


@pytest.mark.parametrize(("computed", "known"), [(0, False), (1, True), (3, True)])
def test_what_others_did_before_is_not_this_prompts(computed: int, known: bool) -> None:
    """A short prompt ten seconds ago, and decoding since; then chunks of its own, each of them as
    predicted. At the first look its first chunk is computed, whose step is yet to be told of."""
    decode = StepReport(StepWork(8, 800), 0.010, 0.010)
    short = StepReport(StepWork(0, 0, prefill_rows=5, prefill_pairs=15), 1.0, 0.001)
    own = [chunk_at(CHUNK * i) for i in range(computed)]
    steps = [*reversed(own), *[decode] * 1000, short]
    told = describe_progress(CHUNK * (computed + 1), 1024, CHUNK, CHUNK, steps, MODEL)
    left = range(CHUNK * (computed + 1), 1024, CHUNK)
    assert told["left_ms"] == pytest.approx(1e3 * sum(chunk_at(at).seconds for at in left))
    assert (told["tokens_per_s"] is not None) == known
    if known:
        assert told["tokens_per_s"] == pytest.approx(
            CHUNK * computed / sum(step.seconds for step in own)
        )


def test_while_its_next_chunk_waits_all_of_it_counts() -> None:
    """A step that decodes is in flight: chunks go on as the last one was."""
    steps = [chunk_at(CHUNK), chunk_at(0)]
    told = describe_progress(2 * CHUNK, 4 * CHUNK, 0, 4096, steps, MODEL)
    left = chunk_at(2 * CHUNK), chunk_at(3 * CHUNK)
    assert told["left_ms"] == pytest.approx(1e3 * sum(step.seconds for step in left))
    took = sum(step.seconds for step in steps)
    assert told["tokens_per_s"] == pytest.approx(2 * CHUNK / took)


def test_before_its_first_chunk_its_rate_is_not_known() -> None:
    told = describe_progress(0, 100, 0, CHUNK, [], MODEL)
    assert told["tokens_per_s"] is None
    first, rest = CHUNK * (CHUNK + 1) / 2, 36 * (64 + 37 / 2)
    assert told["left_ms"] == pytest.approx(2 + 1e-3 * (first + rest))
