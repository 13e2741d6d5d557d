"""Normalisation, rotary embedding and gates agree with PyTorch's operators, and a row's results do
not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ellm_sgl.kernels.bench_operators import (
    gate_in_operators,
    norm_in_operators,
    rope_in_operators,
)
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.cpu.operators import gate, normalise, rotate

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = 1e-6

each_isa = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def normalised(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    found = normalise(x, weight, EPSILON, residual)
    assert found is not None
    return found


@each_isa
@given(
    rows=st.integers(1, 12),
    size=st.one_of(st.integers(1, 130), st.sampled_from((192, 1024))),
    dtype=st.sampled_from(TYPES),
    summed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_norms_agree_with_double_precision(
    isa: str, rows: int, size: int, dtype: torch.dtype, summed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    residual = torch.randn(rows, size).to(dtype) if summed else None
    out, total = normalised(x, weight, residual)
    exact = x.double() if residual is None else x.double() + residual.double()
    if residual is None:
        assert total is None
    else:  # one addition, rounded once
        assert total is not None
        assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    factor = (exact.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
    exact = exact * factor * weight.double()
    # A sum of squares loses nothing to cancellation; what is added to may (x + residual).
    own = 2e-6 * (exact.abs() + factor * weight.double().abs())
    info = torch.finfo(dtype)
    rounding = 0.0 if dtype is torch.float32 else exact.abs() * info.eps / 2 + info.tiny * info.eps
    assert out.dtype is dtype
    assert ((out.double() - exact).abs() <= own + rounding).all()


@each_isa
@given(
    rows=st.integers(1, 12),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.one_of(st.integers(1, 40), st.sampled_from((32, 64))),
    rest=st.sampled_from((0, 0, 5, 16)),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**16),
)
def test_turns_are_pytorchs_to_the_bit(
    isa: str,
    rows: int,
    heads: int,
    kv_heads: int,
    half: int,
    rest: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    head_dim = 2 * half + rest
    # Rows of Q and K as models have them: in one tensor, with V behind them.
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    together = torch.randn(rows, sum(widths)).to(dtype)
    q, k, v = together.split(widths, dim=-1)
    cosines, positions = torch.randn(50, 2 * half).to(dtype), torch.randint(50, (rows,))
    expected = [rope_in_operators(positions, x, head_dim, cosines) for x in (q, k)]
    before = v.clone()
    assert rotate(positions, q, k, head_dim, cosines)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, before)


@pytest.mark.parametrize("dtype", TYPES)
def test_positions_of_a_long_context_are_turned_as_their_own(dtype: torch.dtype) -> None:
    """No position stands for another that is 2^13 or 2^16 before it."""
    torch.manual_seed(0)
    cosines = torch.randn((1 << 20) + 1, 8).to(dtype)
    positions = torch.tensor([0, 8191, 8192, 65_535, 65_536, 200_001, 1 << 20])
    q, k = torch.randn(len(positions), 16).to(dtype), torch.randn(len(positions), 8).to(dtype)
    expected = [rope_in_operators(positions, x, 8, cosines) for x in (q, k)]
    assert rotate(positions, q, k, 8, cosines)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


@each_isa
@given(
    rows=st.integers(1, 12),
    size=st.one_of(st.integers(1, 130), st.just(512)),
    dtype=st.sampled_from(TYPES),
    scale=st.sampled_from((1.0, 30.0, 100.0)),
    seed=st.integers(0, 2**16),
)
def test_gates_agree_with_double_precision(
    isa: str, rows: int, size: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = torch.randn(2, rows, size)
    x = torch.cat((a * scale, b), dim=-1).to(dtype)
    out = gate(x)
    assert out is not None
    assert out.dtype is dtype
    a, b = x.double().chunk(2, dim=-1)
    exact = a * a.sigmoid() * b
    # silu(a) and the product round to the type; what is too small for it comes to nothing.
    info = torch.finfo(dtype)
    rounding = 0.0 if dtype is torch.float32 else info.eps
    least = max(info.tiny * info.eps, 1e-36) * (1 + b.abs())
    assert ((out.double() - exact).abs() <= (2e-6 + rounding) * exact.abs() + least).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [50, 192, 2048])
def test_a_row_does_not_depend_on_the_others(isa: str, dtype: torch.dtype, size: int) -> None:
    rows, head_dim = 200, size // 2
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight, cosines = torch.randn(size).to(dtype), torch.randn(rows, head_dim // 2 * 2).to(dtype)
    positions = torch.randperm(rows)
    before = torch.get_num_threads()

    def results(first: int, count: int) -> list[torch.Tensor]:
        some = slice(first, first + count)
        out, total = normalised(x[some], weight, residual[some])
        assert total is not None
        q, k = x[some].clone(), residual[some].clone()
        assert rotate(positions[some], q, k, head_dim, cosines)
        gated = gate(x[some])
        assert gated is not None
        return [out, total, q, k, gated]

    together = results(0, rows)
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 17, 64, rows):
                for first in range(0, rows - count + 1, 61):
                    for own, of_all in zip(results(first, count), together, strict=True):
                        assert torch.equal(own, of_all[first : first + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_values_at_the_edges_of_a_type(isa: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, float("inf"), 1.0]
    q = torch.tensor([[*edges, float("nan"), 3.0]]).to(dtype)
    k, positions = q.clone(), torch.tensor([0])
    cosines = torch.tensor([[1.0, 0.5, 1.0, 1.0, -1.0, 1.0, 0.0, 2.0, 0.25, 1.0]]).to(dtype)
    expected = rope_in_operators(positions, q, 10, cosines)
    assert rotate(positions, q, k, 10, cosines)
    torch.testing.assert_close(q, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(q.signbit() & ~q.isnan(), expected.signbit() & ~expected.isnan())
    out, _ = normalised(torch.zeros(1, 20).to(dtype), torch.ones(20).to(dtype))
    assert torch.equal(out, torch.zeros(1, 20).to(dtype))
    out, _ = normalised(torch.tensor([[1.0, float("nan")]]).to(dtype), torch.ones(2).to(dtype))
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_gates_are_pytorchs_but_for_a_rounding(isa: str, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 40, 192).to(dtype)
    weight = torch.randn(192).to(dtype)
    out, total = normalised(x, weight, residual)
    expected, expected_total = norm_in_operators(x, weight, EPSILON, residual)
    assert total is not None
    assert torch.equal(total, expected_total)
    gated = gate(x)
    assert gated is not None
    for own, pytorchs in ((out, expected), (gated, gate_in_operators(x))):
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(own, pytorchs, rtol=near, atol=1e-6)
        if dtype is not torch.float32:  # both round where the other does
            assert (own != pytorchs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", TYPES)
def test_gates_at_the_edges(isa: str, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([inf, -inf, nan, 0.0, -0.0, -1e4, 1e4, -89.0, -88.5, 20.0]).to(dtype)
    x = torch.cat((a, torch.ones(10).to(dtype)))[None]
    expected = torch.nn.functional.silu(a)[None]
    torch.testing.assert_close(gate(x), expected, rtol=1e-5, atol=1e-36, equal_nan=True)


def test_norms_of_more_dimensions_and_rows_that_lie_apart() -> None:
    x, weight = torch.randn(3, 4, 60), torch.randn(20)
    apart = x[..., 20:40]
    out, _ = normalised(apart, weight)
    assert out.shape == apart.shape
    assert torch.equal(out, normalised(apart.contiguous(), weight)[0])
    summed = normalised(apart, weight, x[..., :20])
    for own, expected in zip(
        summed, normalised(apart.contiguous(), weight, x[..., :20].contiguous()), strict=True
    ):
        assert own is not None
        assert expected is not None
        assert torch.equal(own, expected)


def test_norms_leave_alone_what_they_cannot_do() -> None:
    x, weight = torch.randn(2, 64), torch.randn(64)
    assert normalise(x, weight, EPSILON, x) is not None
    for case in (
        (x.double(), weight.double(), EPSILON),
        (x.bfloat16(), weight, EPSILON),
        (x[:0], weight, EPSILON),
        (x, weight[:63], EPSILON),
        (x, torch.randn(128)[::2], EPSILON),
        (x.to("meta"), weight.to("meta"), EPSILON),
        (x, weight, EPSILON, x.bfloat16()),
        (x, weight, EPSILON, x[:1]),
    ):
        assert normalise(*case) is None, case
    with torch.enable_grad():
        assert normalise(x, weight, EPSILON) is None


def test_gates_leave_alone_what_they_cannot_do() -> None:
    x = torch.randn(3, 4, 20)
    out = gate(x)
    assert out is not None
    assert out.shape == (3, 4, 10)
    for case in (
        x.double(),
        x[..., :19].contiguous(),
        x[..., 10:],  # rows that lie apart
        x[:0],
        x.to("meta"),
    ):
        assert gate(case) is None
    with torch.enable_grad():
        assert gate(x) is None


def test_turns_leave_alone_what_they_cannot_do() -> None:
    positions, x, cosines = torch.tensor([1, 2]), torch.randn(2, 64), torch.randn(9, 32)
    before = x.clone()
    assert rotate(positions, x.clone(), x.clone(), 32, cosines)
    other = x.bfloat16()
    for case in (
        (torch.tensor([1, 9]), x, x, 32, cosines),  # no such position
        (torch.tensor([-1, 1]), x, x, 32, cosines),
        (positions.int(), x, x, 32, cosines),
        (positions[:1], x, x, 32, cosines),
        (torch.arange(4)[::2], x, x, 32, cosines),
        (positions.view(2, 1), x, x, 32, cosines),
        (positions, x, other, 32, cosines),
        (positions, other, other, 32, cosines),
        (positions, x.double(), x.double(), 32, cosines.double()),
        (positions, x.view(2, 2, 32), x, 32, cosines),
        (positions, x, x[:1], 32, cosines),
        (positions, x.T.contiguous().T, x, 32, cosines),
        (positions, x, x, 48, cosines),
        (positions, x, x, 16, cosines),
        (positions, x, x, 32, cosines[:, :31]),
        (positions, x, x, 32, torch.randn(9, 64)[:, ::2]),
        (positions, x, x, 32, torch.randn(9, 31)),
    ):
        assert not rotate(*case), case
    with torch.enable_grad():
        assert not rotate(positions, x, x, 32, cosines)
    assert torch.equal(x, before)
