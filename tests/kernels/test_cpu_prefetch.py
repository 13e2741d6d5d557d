"""How decode rows prefetch shows in their time alone; what measures it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from ellm_sgl.kernels.choose import choose
from ellm_sgl.kernels.cpu import product, tune
from ellm_sgl.kernels.cpu.attention import mixed_attention
from ellm_sgl.kernels.cpu.library import INSTRUCTION_SETS, ISA_VARIABLE, Product, load
from ellm_sgl.kernels.cpu.prefetch import (
    CANDIDATES,
    DEFAULT,
    FEW_ROWS,
    HINTS,
    MOST_STEPS,
    NONE,
    ONE_ROW,
    READING,
    VARIABLE,
    Prefetch,
    Reading,
    parse,
)
from ellm_sgl.kernels.cpu.product import linear, read_weights
from tests.kernels.cpu_steps import BF16, F32, Sizes, make

built = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

EVERY = (NONE, *(Prefetch(hint, steps) for hint in HINTS for steps in range(1, MOST_STEPS + 1)))
SHAPE = tune.Shape(2, 1, 32, F32, F32)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    for choice in (tune.choose_prefetch, tune.choose_reading):
        choice.cache_clear()
    yield
    for choice in (tune.choose_prefetch, tune.choose_reading):
        choice.cache_clear()
    for dtype in (F32, BF16):
        read_weights(dtype, READING, READING)


@built
@pytest.mark.parametrize("isa", [INSTRUCTION_SETS[0], INSTRUCTION_SETS[-1]])
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
    assert CANDIDATES[0] == DEFAULT
    assert FEW_ROWS[0] == ONE_ROW[0] == READING
    for candidates in (CANDIDATES, FEW_ROWS, ONE_ROW):
        assert len(set(candidates)) == len(candidates)
    for text in ("t0", "t0:0", "t0:5", "t9:1", "t0:1:1", "none:1"):
        with pytest.raises(ValueError, match=f"{text}: give none, or one of t0, t1"):
            parse(text)


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "t2:3")
    assert tune.choose_prefetch(SHAPE) == Prefetch("t2", 3)
    if load().library is not None:
        kernel, said = choose(torch.device("cpu"), 32, F32, F32, (2, 1))
        assert said.endswith(", prefetch t2:3; weights: one row t2:3, few t2:3)")
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

    def noted(work: tune.Seconds[Prefetch], candidates: Sequence[Prefetch], rounds: int) -> object:
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
        one, few = tune.choose_reading(dtype)
        assert one in ONE_ROW and few in FEW_ROWS


@built
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(1, 64), (7, 1031), (37, 192), (64, 512)])
def test_products_are_the_same_to_the_bit(
    isa: str, dtype: torch.dtype, outputs: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the end of the weights, behind which there may be nothing to ask for."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    x, weight = torch.randn(8, size).to(dtype), torch.randn(outputs, size).to(dtype)
    for rows in (1, 8):
        expected = linear(x[:rows], weight, reading=READING)
        assert expected is not None
        for reading in (*map(Reading, EVERY), Reading(NONE, in_order=True)):
            out = linear(x[:rows], weight, reading=reading)
            assert out is not None
            assert torch.equal(out, expected), reading


@built
def test_weights_are_read_as_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def noted(*fields: int) -> Product:
        given.append(fields[-3:])
        return Product(*fields)

    monkeypatch.setattr(product, "Product", noted)
    weight = torch.randn(4, 512)
    linear(torch.randn(1, 512), weight)
    read_weights(F32, Reading(NONE, in_order=True), Reading(Prefetch("t2", 3)))
    for rows in (1, 2, 16, 17):
        linear(torch.randn(rows, 512), weight)
    for size in (511, 2049):  # a row of them shorter or longer than is read in order
        linear(torch.randn(1, size), torch.randn(4, size))
    linear(torch.randn(2, 512).bfloat16(), weight.bfloat16())
    linear(torch.randn(2, 512), weight, reading=Reading(Prefetch("nta", 1)))
    default, few = (0, 1, False), (2, 3, False)
    assert given == [
        default, (0, 0, True), few, few, default, few, few, default, (3, 1, False),
    ]  # fmt: skip


@built
def test_the_environment_is_for_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "t2:3")
    assert tune.choose_reading(F32) == (Reading(Prefetch("t2", 3)), Reading(Prefetch("t2", 3)))
