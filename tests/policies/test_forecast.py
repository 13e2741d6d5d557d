"""What batches are expected to come to, against requests drawn one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies.base import IntArray, SystemState
from ellm_sgl.policies.lengths import OutputLengths, Seen
from ellm_sgl.policies.problem import forecast
from ellm_sgl.policies.problem.candidates import Candidates, short_tokens
from ellm_sgl.policies.problem.forecast import DEVIATIONS, Forecast
from ellm_sgl.policies.testing import Size, make_state, random_state, requests
from tests.policies.known_lengths import TO_THE_BOUND

BLOCK = 16


class Linear(LatencyModel):
    """A millisecond per row, and per ten tokens of a prompt."""

    def step_seconds(self, work: StepWork) -> FloatArray:
        rows = np.asarray(work.decode_rows) + 0.1 * np.asarray(work.prefill_rows)
        return np.asarray(1e-3 * rows)

    def observe(self, work: StepWork, seconds: float) -> None: ...


def seen(lengths: IntArray) -> OutputLengths:
    known = Seen.nothing()
    for length in lengths.tolist():
        known = known.and_one(length, cut_off=False)
    return replace(OutputLengths.nothing(), seen=known)


def crowd(rng: np.random.Generator, count: int = 40) -> SystemState:
    """Requests that have generated some tokens of up to 2,000."""
    generated = rng.integers(1, 300, count)
    running = requests(
        (100 + generated).tolist(), prompt_tokens=100, max_new_tokens=rng.integers(301, 2000, count)
    )
    lengths = seen(rng.exponential(400, 300).astype(np.int64) + 1)
    return make_state(running, device_tokens=40_000, lengths=lengths)


def test_rows_tokens_and_memory_are_those_of_requests_drawn_one_by_one() -> None:
    rng = np.random.default_rng(0)
    state = crowd(rng)
    running, found = state.running, Forecast.of(state, 0)
    generated = running.tokens - running.prompt_tokens
    fine = np.arange(found.steps[-1] + 1)
    survives = state.lengths.survival(generated, running.priority, fine)
    drawn = (rng.random((4000, 1, len(generated))) < survives[None, found.steps]).astype(float)
    ends = found.steps[:, None] >= running.max_new_tokens - generated
    drawn[:, ends] = 0.0
    lengths = running.tokens + found.steps[:, None]
    rows, tokens = drawn.sum(2).mean(0), (drawn * lengths).sum(2).mean(0)
    assert found.rows[:, -1] == pytest.approx(rows, rel=0.02, abs=0.05)
    assert found.tokens[:, -1] == pytest.approx(tokens, rel=0.02, abs=20)
    held = (drawn * ((lengths // BLOCK + 1) * BLOCK)).sum(2)
    free = state.memory.device_tokens
    planned = found.short[:, -1] + free
    assert planned == pytest.approx(held.mean(0) + DEVIATIONS * held.std(0), rel=0.05, abs=40)


@pytest.mark.parametrize("seed", range(30))
def test_the_first_time_is_now_and_nothing_is_planned_beyond_all_bounds(seed: int) -> None:
    size = Size(running=seed + 1, waiting=24, longest=4096)
    state = random_state(np.random.default_rng(seed), size, exact_size=True)
    found = Forecast.of(state, 0)
    now = Candidates.of(state)
    assert found.steps[0] == 0 and (np.diff(found.steps) > 0).all()
    assert found.rows[0, -1] == len(state.running)
    assert found.tokens[0, -1] == now.tokens.sum()
    assert found.short[0, -1] == short_tokens(state, now)
    longest = Candidates.of(state, ahead=1 << 40)
    assert (found.short[:, -1] <= short_tokens(state, longest)).all()


@pytest.mark.parametrize("count", [1, 3])
def test_memory_is_fullest_before_somebody_ends(count: int) -> None:
    """Few requests that go on to their bounds: the peak is seen exactly."""
    most = [100, 900, 333][:count]
    running = requests([200] * count, max_new_tokens=most)
    state = make_state(running, device_tokens=10**6, lengths=TO_THE_BOUND)
    peak = 0
    for step in range(900):
        alive = [200 + step for m in most if step < m]
        peak = max(peak, sum((tokens // BLOCK + 1) * BLOCK for tokens in alive))
    assert Forecast.of(state, 0).short.max() + 10**6 == pytest.approx(peak, abs=BLOCK)


def scene(tpot_s: float, pace: float = 1.0, prompt: int = 100) -> SystemState:
    """Ten requests that take 10 ms a token of 12, after 100 tokens at `tpot_s`; one waits."""
    running = requests([200] * 10, prompt_tokens=100, max_new_tokens=400, tpot_s=tpot_s)
    return make_state(
        running,
        requests([prompt], request_id=[99], max_new_tokens=300),
        device_tokens=10**6,
        latency=Linear(),
        tpot_slo_s=0.012,
        pace=pace,
        lengths=TO_THE_BOUND,
    )


@pytest.mark.parametrize(
    ("state", "size"),
    [
        (scene(0.01), 11),  # 11 ms a token, 0.95 x 12 allowed
        (scene(0.01, pace=1.1), 10),
        (scene(0.01, prompt=5000), 10),  # nobody decodes while it is computed
        (scene(0.01, prompt=2500), 11),  # they make up for it until they end
        (scene(0.01, prompt=1000), 11),  # they are that far ahead
        (scene(0.0115), 11),
        (scene(0.0121), 11),  # 10 ms behind, which they make up for
        (scene(0.0133), 10),  # 130 ms behind: they come in time alone, not with it
        (scene(0.05), 11),  # far behind: they miss it anyway
    ],
    ids=[
        "in time",
        "slow",
        "long prompt",
        "made up for",
        "prompt",
        "ahead",
        "a little behind",
        "behind",
        "lost",
    ],
)
def test_a_newcomer_makes_nobody_late(state: SystemState, size: int) -> None:
    assert Forecast.of(state, 1).solve() == size
    assert Forecast.of(state, 1).solve(keep_slo=False) == 11


def test_those_who_do_not_even_fit_now_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        state = random_state(np.random.default_rng(seed), Size(24, 48, 4096))
        most = max(min(len(state.waiting), state.max_running - len(state.running)), 0)
        whole = Forecast.of(state, most)
        monkeypatch.setattr(forecast, "MANY", 0)
        cut = Forecast.of(state, most)
        monkeypatch.undo()
        assert cut.rows.shape[1] <= whole.rows.shape[1]
        assert cut.solve() == whole.solve()
