"""The paper's equations, term by term."""

from __future__ import annotations

import numpy as np
import pytest

from ellm_sgl.latency import PaperLatencyModel, StepWork, paper
from tests.latency.machines import GPU, LLAMA, work_of

h, L, V = LLAMA.hidden, LLAMA.layers, LLAMA.vocabulary
S, R = np.array([100, 3000, 17]), np.array([0.5, 0.25, 0.0])


def test_eq_4_is_the_sum_of_eq_2_and_eq_3_over_unequal_requests() -> None:
    v_rec = sum(24 * h**2 * L * s * r + 4 * h * L * s**2 * r**2 + 2 * h * V * s * r
                for s, r in zip(S, R, strict=True))  # fmt: skip
    v_dec = sum(24 * h**2 * L + 4 * h * L * (s + 1) + 2 * h * V * s for s in S)
    work = work_of(S, S * R)
    assert PaperLatencyModel(LLAMA, GPU).step_seconds(work) == pytest.approx(
        (v_rec + v_dec) / GPU.flops
    )


def test_eq_8() -> None:
    n, squares, l2 = 600, 90_000, 2
    layers = 24 * h**2 * n + 4 * h * squares
    head = 2 * h * V * n
    assert paper.recompute_layers_flops(LLAMA, n, squares, l2) == pytest.approx(layers * l2 + head)


def test_eq_9() -> None:
    b, tokens, layers = 3, 3117, 4
    expected = 24 * h**2 * layers * b + 4 * h * layers * (tokens + b) + 2 * h * V * tokens
    assert paper.decode_layers_flops(LLAMA, b, tokens, layers) == pytest.approx(expected)


def test_time_per_token_does_not_depend_on_the_batch() -> None:
    model = PaperLatencyModel(LLAMA, GPU)
    b = np.arange(1.0, 65.0)
    per_token = model.step_seconds(StepWork(b, 700 * b)) / b
    np.testing.assert_allclose(per_token, per_token[0])


def test_it_does_not_learn() -> None:
    model = PaperLatencyModel(LLAMA, GPU)
    work = work_of([100], [0])
    before = float(model.step_seconds(work))
    model.observe(work, 10 * before)
    assert float(model.step_seconds(work)) == before
