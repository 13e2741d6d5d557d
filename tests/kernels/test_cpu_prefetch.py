"""How decode rows prefetch shows in their time alone; what measures it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from ellm_sgl.kernels.choose import choose
from ellm_sgl.kernels.cpu import product, tune
from ellm_sgl.kernels.cpu.attention import mixed_attention
from ellm_sgl.kernels.cpu.library import (
    INSTRUCTION_SETS,
    ISA_VARIABLE,
    Product,
    best_instruction_set,
    load,
)
from ellm_sgl.kernels.cpu.prefetch import (
    CANDIDATES,
    DEFAULT,
    HINTS,
    MOST_STEPS,
    NONE,
    OF_WEIGHTS,
    VARIABLE,
    Prefetch,
    parse,
)
from ellm_sgl.kernels.cpu.product import linear, prefetch_weights
from tests.kernels.cpu_steps import BF16, F32, Sizes, make

built = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

EVERY = (NONE, *(Prefetch(hint, steps) for hint in HINTS for steps in range(1, MOST_STEPS + 1)))
SHAPE = tune.Shape(2, 1, 32, F32, F32)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    kept = (tune.choose_prefetch, tune.choose_weight_prefetch, best_instruction_set)
    for choice in kept:
        choice.cache_clear()
    yield
    for choice in kept:
        choice.cache_clear()
    for dtype in (F32, BF16):
        prefetch_weights(dtype, DEFAULT)


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "dtype"), [(2, 4, 128, BF16), (8, 1, 128, F32), (2, 3, 32, F32)]
)
def test_results_are_the_same_to_the_bit(
    isa: str, heads: int, group: int, head_dim: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(ISA_VARIABLE, isa)
    requests = ((1300, 1), (511, 1), (1, 1), (95, 3), (33, 1), (0, 1))
    inputs = make(Sizes(requests, 16, heads, group, head_dim, dtype, dtype, 0.1))
    expected, _, _ = inputs.run(mixed_attention)
    for prefetch in EVERY:
        assert torch.equal(inputs.run(mixed_attention, prefetch=prefetch)[0], expected), prefetch


def test_a_choice_is_written_as_it_is_read() -> None:
    assert [parse(str(choice)) for choice in EVERY] == list(EVERY)
    for candidates in (CANDIDATES, OF_WEIGHTS):
        assert candidates[0] == DEFAULT
        assert len(set(candidates)) == len(candidates)
    for text in ("t0", "t0:0", "t0:5", "t9:1", "t0:1:1", "none:1"):
        with pytest.raises(ValueError, match=f"{text}: give none, or one of t0, t1"):
            parse(text)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "t2:3")
    assert tune.choose_prefetch(SHAPE) == Prefetch("t2", 3)
    if load().library is not None:
        kernel, said, prefetch = choose(torch.device("cpu"), 32, F32, F32, (2, 1))
        assert prefetch == Prefetch("t2", 3)
        assert said.endswith(", prefetch t2:3, of weights t2:3)")
        inputs = make(Sizes(((90, 1),), 16, 1, 2, 32, F32, F32, 0.0))
        assert torch.equal(inputs.run(kernel)[0], inputs.run(mixed_attention)[0])


@built
@pytest.mark.parametrize(
    ("alone", "chosen"), [(0.7, Prefetch("t1", 1)), (0.94, Prefetch("t1", 1)), (0.96, DEFAULT)]
)
def test_another_than_the_default_must_win_twice(
    alone: float, chosen: Prefetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among all it seems to win; it is taken if it wins against the default alone as well."""
    monkeypatch.delenv(VARIABLE, raising=False)
    best = Prefetch("t1", 1)

    def seconds(prefetch: Prefetch) -> float:
        return (0.9 if len(compared) > 2 else alone) if prefetch == best else 1.0

    compared: Sequence[Prefetch] = ()
    ratios = tune._ratios

    def noted(work: tune.Seconds, candidates: Sequence[Prefetch], rounds: int) -> object:
        nonlocal compared
        compared = candidates
        return ratios(work, candidates, rounds)

    monkeypatch.setattr(tune, "_decode_rows", lambda shape: seconds)
    monkeypatch.setattr(tune, "_ratios", noted)
    assert tune.choose_prefetch(SHAPE) == chosen


@built
def test_measuring_finds_one_of_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tune, "SLICE_BYTES", 1 << 14)
    for shape in (SHAPE, tune.Shape(8, 2, 64, BF16, BF16), tune.Shape(2, 2, 32, F32, BF16)):
        assert tune.choose_prefetch(shape) in CANDIDATES
    for dtype in (F32, BF16):
        assert tune.choose_weight_prefetch(dtype) in OF_WEIGHTS


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("outputs", "size"), [(1, 64), (7, 1031), (37, 192), (64, 512)])
def test_products_are_the_same_to_the_bit(
    isa: str, dtype: torch.dtype, outputs: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the end of the weights, behind which there may be nothing to ask for."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    if INSTRUCTION_SETS[best_instruction_set()] != isa:  # as the fixture `isa`: no set runs twice
        pytest.skip(f"this processor has no {isa}")
    x, weight = torch.randn(8, size).to(dtype), torch.randn(outputs, size).to(dtype)
    for rows in (1, 8):
        expected = linear(x[:rows], weight, prefetch=DEFAULT)
        assert expected is not None
        for prefetch in EVERY:
            out = linear(x[:rows], weight, prefetch=prefetch)
            assert out is not None
            assert torch.equal(out, expected), prefetch


@built
def test_nothing_is_measured_for_products_that_ask_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if INSTRUCTION_SETS[best_instruction_set()] != "amx":
        pytest.skip("this processor has no amx")
    monkeypatch.setattr(tune, "_fastest", lambda *_: pytest.fail("measured"))
    assert tune.choose_weight_prefetch(BF16) == DEFAULT


@built
def test_products_ask_as_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "t2:3")
    given = []

    def noted(*fields: int) -> Product:
        given.append(fields[-2:])
        return Product(*fields)

    monkeypatch.setattr(product, "Product", noted)
    x, weight = torch.randn(2, 64), torch.randn(8, 64)
    linear(x, weight)
    tune.choose_weight_prefetch(F32)
    linear(torch.randn(17, 64), weight)
    linear(x, weight)
    linear(x.bfloat16(), weight.bfloat16())
    linear(x, weight, prefetch=Prefetch("nta", 1))
    assert given == [(0, 1), (0, 1), (2, 3), (0, 1), (3, 1)]
