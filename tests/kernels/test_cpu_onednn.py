"""Products of many rows: oneDNN's agree with PyTorch's, and other products are left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ellm_sgl.kernels.cpu.onednn import FASTER, linear_of_many

pytestmark = pytest.mark.skipif(not FASTER, reason="left to PyTorch: no oneDNN, or no AVX-512")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 700),
    size=st.one_of(st.integers(1, 100), st.sampled_from((192, 2560))),
    outputs=st.one_of(st.integers(1, 40), st.sampled_from((300, 1111))),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_pytorch_in_double_precision(
    rows: int, size: int, outputs: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, size), torch.randn(outputs, size)
    bias = torch.randn(outputs) if biased else None
    out = linear_of_many(x, weight, bias)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = functional.linear(x.double().abs(), weight.double().abs()) + 1
    assert out is not None and out.shape == exact.shape
    assert ((out.double() - exact).abs() <= 4e-6 * magnitude).all()


@pytest.mark.parametrize("size", [192, 2560])
def test_a_row_does_not_depend_on_how_many_there_are(size: int) -> None:
    x, weight = torch.randn(600, size), torch.randn(300, size)
    whole = linear_of_many(x, weight)
    assert whole is not None
    for rows in (65, 128, 200, 511):
        some = linear_of_many(x[:rows], weight)
        assert some is not None and torch.equal(some, whole[:rows])


def test_rows_that_are_parts_of_others() -> None:
    x, weight = torch.randn(70, 100)[:, 20:84], torch.randn(30, 64)
    out = linear_of_many(x, weight)
    assert out is not None
    torch.testing.assert_close(out, functional.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_other_products_are_left_to_pytorch() -> None:
    x, weight = torch.randn(70, 64), torch.randn(30, 64)
    assert linear_of_many(x, weight) is not None
    assert linear_of_many(x.double(), weight.double()) is None
    assert linear_of_many(x.bfloat16(), weight.bfloat16()) is None
    assert linear_of_many(x, weight.bfloat16()) is None
    assert linear_of_many(x, weight, torch.randn(29)) is None
    assert linear_of_many(x, weight, torch.randn(30).bfloat16()) is None
    assert linear_of_many(x, weight, torch.randn(60)[::2]) is None
    assert linear_of_many(x[:0], weight) is None
    assert linear_of_many(x[:, :63], weight) is None
    assert linear_of_many(x, torch.randn(64, 30).T) is None
    assert linear_of_many(x[0], weight) is None
    assert linear_of_many(x, weight.clone().requires_grad_()) is None
    assert linear_of_many(x, torch.nn.Linear(64, 30).weight) is None
    with torch.no_grad():
        assert linear_of_many(x, torch.nn.Linear(64, 30).weight) is not None
