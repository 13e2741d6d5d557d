"""What batches are worth with those in mind who are not in them."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray
from ellm_sgl.policies.problem.forecast import Forecast
from ellm_sgl.policies.problem.left_over import rate_of_all
from ellm_sgl.policies.testing import make_state, requests
from tests.policies.known_lengths import TO_THE_BOUND

STEP_S, ROW_S = 4e-3, 3e-4


class Steps(LatencyModel):
    """A fixed time, one for each row, and, if anything is restored, one more."""

    def __init__(self, restoring_s: float) -> None:
        self.restoring_s = restoring_s

    def step_seconds(self, work: StepWork) -> FloatArray:
        restores = np.minimum(work.restored_tokens, 1)
        fixed = np.where(np.greater(work.decode_rows, 0), STEP_S, 0.0)
        return np.asarray(fixed + ROW_S * work.decode_rows + self.restoring_s * restores)

    def observe(self, work: StepWork, seconds: float) -> None:
        pass


def test_those_left_over_take_the_time_of_steps_of_their_own() -> None:
    sizes = np.arange(1, 25)
    rate = sizes / (STEP_S + ROW_S * sizes)
    known = rate_of_all(rate, sizes, np.inf, 24, 100.0, Steps(0.0))
    assert known[-1] == pytest.approx(rate[-1])
    expected = 24 / (21 / rate[20] + STEP_S + 3 * ROW_S)
    assert known[20] == pytest.approx(expected)
    assert (known <= rate * (1 + 1e-9)).all()


def test_of_many_who_wait_the_rate_alone_decides() -> None:
    rate = np.array([100.0, 300.0, 0.0, 200.0])
    known = rate_of_all(rate, np.arange(1, 5), np.inf, 1000, 100.0, Steps(0.0))
    assert known == pytest.approx(rate)


@pytest.mark.parametrize(
    ("waiting", "slo_ms", "admitted"), [(3, np.inf, 3), (200, np.inf, 0), (3, 20.0, 0)]
)
def test_the_last_few_join_where_many_would_wait(
    waiting: int, slo_ms: float, admitted: int
) -> None:
    """Restoring makes each step longer by a fifth: not worth it for those who come after, but
    less than three requests take by themselves. With an SLO nobody's steps get slower for it."""
    running = requests([200] * 21, max_new_tokens=300)
    state = make_state(
        running,
        requests([100] * waiting, max_new_tokens=300),
        device_tokens=21 * 512,
        host_tokens=1 << 20,
        tpot_slo_s=slo_ms / 1e3,
        latency=Steps(0.2 * (STEP_S + 21 * ROW_S)),
        lengths=TO_THE_BOUND,
    )
    assert Forecast.of(state, min(waiting, 3)).solve(may_pause=False) == 21 + admitted
