"""Products of few rows agree with PyTorch's, and a row's does not depend on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.cpu.product import MOST_ROWS, linear, most_rows

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = linear(x, weight, bias)
    assert out is not None
    return out


BF16 = torch.bfloat16
TYPES = (torch.float32, BF16, torch.float16)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.one_of(st.integers(1, 16), st.integers(17, 80)),
    size=st.one_of(st.integers(1, 100), st.sampled_from((192, 512, 1024))),
    outputs=st.one_of(st.integers(1, 40), st.sampled_from((300, 1111))),
    dtype=st.sampled_from(TYPES),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_pytorch_in_double_precision(
    isa: str, rows: int, size: int, outputs: int, dtype: torch.dtype, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = min(rows, most_rows(size, dtype))
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(outputs, size).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    out = multiply(x, weight, bias)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Sums are fp32, bounded by those of magnitudes; the result is rounded once.
    magnitude = functional.linear(x.double().abs(), weight.double().abs()) + 1
    rounding = exact.abs() * torch.finfo(dtype).eps if dtype != torch.float32 else 0
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= 4e-6 * magnitude + rounding).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("size", "outputs"), [(192, 37), (1031, 520)])
def test_a_row_does_not_depend_on_the_others(
    isa: str, dtype: torch.dtype, size: int, outputs: int
) -> None:
    most = min(100, most_rows(size, dtype))
    x, weight = torch.randn(most, size).to(dtype), torch.randn(outputs, size).to(dtype)
    together = multiply(x, weight)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 4, 5, 8, 33, most):
                for first in range(0, most - count + 1, 5 if most <= 32 else 21):
                    rows = slice(first, first + count)
                    assert torch.equal(multiply(x[rows], weight), together[rows])
    finally:
        torch.set_num_threads(before)


def test_how_many_rows_it_does_in_16_bits(isa: str) -> None:
    """Of more PyTorch's are faster: sooner where sums are short, later by a matrix unit."""
    for size, most in ((64, 32 if isa == "amx" else 16), (1024, 64 if isa == "amx" else 32)):
        x, weight = torch.randn(most + 1, size).to(BF16), torch.randn(8, size).to(BF16)
        assert linear(x, weight) is None
        assert linear(x[:most], weight) is not None


def test_rows_that_lie_apart_and_more_dimensions() -> None:
    x, weight = torch.randn(6, 400), torch.randn(30, 100)
    apart = x[:, 100:200]
    assert torch.equal(multiply(apart, weight), multiply(apart.contiguous(), weight))
    folded = multiply(x.view(2, 12, 100), weight)
    assert torch.equal(folded.view(24, 30), multiply(x.view(24, 100), weight))
    across = torch.randn(100, 6)
    assert torch.equal(multiply(across.T, weight), multiply(across.T.contiguous(), weight))


def test_large_and_special_values() -> None:
    x = torch.tensor([[3e38, 3e38], [float("inf"), 1.0], [float("nan"), 0.0]])
    out = multiply(x, torch.ones(1, 2))
    assert out[0].isposinf()
    assert out[1].isposinf()
    assert out[2].isnan()


class Elsewhere(torch.Tensor):
    """As torchao's weights: says that it is plain, and has no memory of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's stub leaves out the function
        cls, function: Any, *_: Any, **__: Any
    ) -> Any:
        raise NotImplementedError(function)


def test_leaves_alone_what_lies_elsewhere() -> None:
    x, weight = torch.randn(2, 64), torch.randn(8, 64)
    elsewhere = Elsewhere(weight)
    assert elsewhere.is_contiguous() and elsewhere.dtype is x.dtype and elsewhere.is_cpu
    assert linear(x, elsewhere) is None
    assert linear(x, torch.nn.Parameter(weight, requires_grad=False)) is not None


def test_leaves_alone_what_it_cannot_do() -> None:
    x, weight, bias = torch.randn(2, 64), torch.randn(8, 64), torch.randn(8)
    assert linear(x, weight, bias) is not None
    for case in (
        (torch.randn(MOST_ROWS[torch.float32] + 1, 64), weight),
        (torch.randn(most_rows(64, BF16) + 1, 64).bfloat16(), weight.bfloat16()),
        (x[:0], weight),
        (x[:, :0], weight[:, :0]),
        (torch.tensor(1.0), weight),
        (x.bfloat16(), weight),
        (x.double(), weight.double()),
        (x, torch.randn(8, 63)),
        (x, torch.randn(8, 128)[:, ::2]),
        (x, torch.randn(8, 64, requires_grad=True)),
        (x.to("meta"), weight.to("meta")),
        (x, weight, bias.bfloat16()),
        (x, weight, bias[:7]),
        (x, weight, torch.randn(16)[::2]),
    ):
        assert linear(*case) is None, case
    with torch.no_grad():
        assert linear(x, torch.randn(8, 64, requires_grad=True)) is not None
