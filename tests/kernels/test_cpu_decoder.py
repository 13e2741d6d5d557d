"""A stack of layers in one call has the results of its operators one by one, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ellm_sgl.kernels.cpu.attention import mixed_attention
from ellm_sgl.kernels.cpu.decoder import (
    CompiledDecoder,
    Heads,
    LayerWeights,
    NormWeights,
    ProductWeights,
)
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.cpu.operators import gate, normalise, rotate
from ellm_sgl.kernels.cpu.prefetch import DEFAULT
from ellm_sgl.kernels.cpu.product import linear
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from tests.kernels.cpu_steps import Inputs, Sizes, make
from tests.kernels.threads import wait_until_asleep

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, INNER, LAYERS, POSITIONS = 48, 80, 3, 400
GROUPS = (0, 0, 1)
"""Of the layers."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def weights(heads: Heads, dtype: torch.dtype, of_heads: bool, biased: bool) -> LayerWeights:
    """Random ones; what they do to a row neither grows nor fades from layer to layer."""

    def norm(size: int) -> NormWeights:
        return NormWeights((1 + 0.1 * torch.randn(size)).to(dtype), 1e-6)

    def product(outputs: int, size: int, bias: bool = False) -> ProductWeights:
        weight = (torch.randn(outputs, size) / size**0.5).to(dtype)
        return ProductWeights(weight, torch.randn(outputs).to(dtype) if bias else None)

    angles = torch.rand(POSITIONS, heads.size // 2) * 6.3
    query, kv = heads.query * heads.size, heads.kv * heads.size
    return LayerWeights(
        input_norm=norm(HIDDEN),
        qkv=product(query + 2 * kv, HIDDEN, biased),
        query_norm=norm(heads.size) if of_heads else None,
        key_norm=norm(heads.size) if of_heads else None,
        cosines=torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype),
        scale=heads.size**-0.5,
        out=product(HIDDEN, query),
        output_norm=norm(HIDDEN),
        mlp=(product(2 * INNER, HIDDEN), product(HIDDEN, INNER)),
    )


def experts(x: torch.Tensor) -> torch.Tensor:
    """Somebody else's, whatever they compute."""
    return torch.tanh(x).flip(1)


class Case:
    """A decoder, a step of it, and a pool for each layer.

    Args:
        sparse: layers with experts.
        deep: of the recomputed rows those that go through both groups; the rest needs the first.
    """

    def __init__(
        self,
        inputs: Inputs,
        sizes: Sizes,
        of_heads: bool,
        biased: bool,
        deep: float = 1.0,
        sparse: tuple[int, ...] = (),
    ) -> None:
        self.heads, dtype = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim), sizes.row_type
        self.layers = [weights(self.heads, dtype, of_heads, biased) for _ in range(LAYERS)]
        for index in sparse:
            self.layers[index] = replace(self.layers[index], mlp=None)
        first = inputs.layout
        self.new = first.requests[-1].new.end_row
        self.embedded = torch.randn(first.rows, HIDDEN).to(dtype)
        ranges = [r.new for r in first.requests] + _spans(first.requests)
        positions = [at for of in ranges for at in range(of.position, of.end_position)]
        self.positions = torch.tensor(positions)
        self.pools = [(inputs.keys.clone(), inputs.values.clone()) for _ in range(LAYERS)]
        if first.rows == self.new:  # as a plan has it, groups that differ in nothing but units
            one = first.stacked
            both = one.units.repeat(2, 1), one.write_units.repeat(2, 1)
            self.groups = one._replace(units=both[0], write_units=both[1]).layouts()
        else:
            left = round(deep * len(_spans(first.requests)))
            self.groups = first, _with_spans(first, left, self.pools[-1], sizes.block_tokens)

    def rows(self, group: int) -> int:
        """Alive in it; past the last one, the new ones."""
        return self.groups[group].rows if group < len(self.groups) else self.new

    def one_by_one(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual stream) by each operator in a call of its own."""
        hidden, residual = self.embedded, None
        size, of_query = self.heads.size, self.heads.query * self.heads.size
        of_kv = self.heads.kv * size
        for index, layer in enumerate(self.layers):
            normed, total = _norm(layer.input_norm, hidden, residual)
            residual = hidden if total is None else total
            q, k, v = _product(layer.qkv, normed).split([of_query, of_kv, of_kv], dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                q = _norm(layer.query_norm, q.reshape(-1, size))[0].view(q.shape)
                k = _norm(layer.key_norm, k.reshape(-1, size))[0].view(k.shape)
            assert rotate(self.positions[: len(q)], q, k, size, layer.cosines)
            q, k, v = (x.unflatten(1, (-1, size)) for x in (q, k, v))
            ends = GROUPS[index] not in GROUPS[index + 1 :]
            after, group = self.rows(GROUPS[index] + ends), self.groups[GROUPS[index]]
            pool = self.pools[index]
            attended = mixed_attention(q, k, v, *pool, group, layer.scale, after, 0.5)
            out = _product(layer.out, attended.flatten(1))
            normed, residual = _norm(layer.output_norm, out, residual[:after])
            hidden = experts(normed) if layer.mlp is None else _mlp(layer.mlp, normed)
        assert residual is not None
        return hidden, residual

    def compiled(self) -> CompiledDecoder:
        keys, values = zip(*self.pools, strict=True)
        return CompiledDecoder(self.layers, self.heads, keys, values, GROUPS, DEFAULT)

    def at_once(self, *stops: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same compiled, in calls that end at these layers."""
        decoder, first = self.compiled(), 0
        step = decoder.prepare(self.embedded, self.positions, self.groups, 0.5)
        sparse = {index for index, layer in enumerate(self.layers) if layer.mlp is None}
        for stop in sorted({*stops, LAYERS, *(index + 1 for index in sparse)}):
            assert decoder.run(step, first, stop)
            first = stop
            if stop - 1 in sparse:
                decoder.put(step, stop - 1, experts(decoder.normed(step, stop - 1)))
        return decoder.outputs(self.new)


def _spans(requests: tuple[RequestLayout, ...]) -> list[RowRange]:
    """In the order of their rows."""
    return [span for request in requests for span in request.spans]


def _with_spans(
    layout: GroupLayout, left: int, pool: tuple[torch.Tensor, torch.Tensor], block_tokens: int
) -> GroupLayout:
    """A group where only the first `left` spans are missing; the others' blocks have units, and
    in these some KV."""
    units, requests = layout.units.clone(), []
    unused = iter(set(range(1, len(pool[0]))) - set(units.tolist()))
    end = _spans(layout.requests)[left - 1].end_row if left else layout.requests[-1].new.end_row
    for request in layout.requests:
        kept = tuple(span for span in request.spans if span.row < end)
        for span in request.spans[len(kept) :]:
            at = next(unused)
            units[request.blocks.start + span.position // block_tokens] = at
            for of in pool:
                of[at, : span.size] = torch.randn(of[at, : span.size].shape).to(of.dtype)
        requests.append(request._replace(spans=kept))
    return GroupLayout.of(
        end, tuple(requests), units, layout.write_rows, layout.write_units, layout.write_offsets
    )


def _norm(
    norm: NormWeights, x: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    found = normalise(x, norm.weight, norm.epsilon, residual)
    assert found is not None
    return found


def _product(product: ProductWeights, x: torch.Tensor) -> torch.Tensor:
    found = linear(x, product.weight, product.bias)
    assert found is not None
    return found


def _mlp(weights: tuple[ProductWeights, ProductWeights], x: torch.Tensor) -> torch.Tensor:
    gated = gate(_product(weights[0], x))
    assert gated is not None
    return _product(weights[1], gated)


def check(case: Case, *stops: int) -> None:
    before = [(k.clone(), v.clone()) for k, v in case.pools]
    expected = case.one_by_one()
    written = [(k.clone(), v.clone()) for k, v in case.pools]
    for now, then in zip(case.pools, before, strict=True):
        for tensor, kept in zip(now, then, strict=True):
            tensor.copy_(kept)
    for of, one in zip(case.at_once(*stops), expected, strict=True):
        assert torch.equal(of, one)
    torch.testing.assert_close(case.pools, written, rtol=0, atol=0, equal_nan=True)


@st.composite
def steps(draw: st.DrawFn) -> Sizes:
    """Of up to 16 new rows: as many as all products take, in any type."""
    requests, rows = [], 0
    for _ in range(draw(st.integers(1, 8))):
        new = draw(st.sampled_from((1, 1, 1, 3)))
        if rows + new <= 16:
            requests.append((draw(st.integers(0, 90)), new))
            rows += new
    missing = draw(st.sampled_from((0.0, 0.0, 0.3)))
    dtype = draw(st.sampled_from(TYPES)) if missing == 0.0 else torch.float32
    return Sizes(
        requests=tuple(requests),
        block_tokens=draw(st.sampled_from((8, 16))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((16, 32))),
        row_type=dtype,
        pool_type=dtype,
        missing=missing,
        seed=draw(st.integers(0, 2**16)),
    )


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=steps(), of_heads=st.booleans(), biased=st.booleans(),
    stops=st.sampled_from(((), (1,), (2,), (1, 2))), threads=st.integers(1, 3),
    deep=st.sampled_from((0.0, 0.5, 1.0)),
    sparse=st.sampled_from(((), (), (1,), (0, 2), (0, 1, 2))),
)  # fmt: skip
def test_a_stack_is_its_operators_one_by_one(
    isa: str,
    sizes: Sizes,
    of_heads: bool,
    biased: bool,
    stops: tuple[int, ...],
    threads: int,
    deep: float,
    sparse: tuple[int, ...],
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(Case(make(sizes), sizes, of_heads, biased, deep, sparse), *stops)
    finally:
        torch.set_num_threads(before)


SIZES = Sizes(((20, 1), (3, 1)), 16, 2, 2, 16, torch.float32, torch.float32, 0.0)


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    return Case(make(SIZES), SIZES, of_heads=False, biased=False)


def test_steps_follow_one_another(case: Case) -> None:
    """Nothing of a step stays in the buffers that the next one reads."""
    decoder = case.compiled()
    other = torch.full_like(case.embedded, 1e30)
    step, between = (
        decoder.prepare(x, case.positions, case.groups, 0.5) for x in (case.embedded, other)
    )
    assert decoder.run(step, 0, LAYERS)
    expected = [x.clone() for x in decoder.outputs(2)]
    assert decoder.run(between, 0, LAYERS)
    assert decoder.run(step, 0, LAYERS)
    assert all(map(torch.equal, decoder.outputs(2), expected))


@pytest.mark.usefixtures("four_threads")
def test_threads_sleep_after_a_step() -> None:
    """Between its operators they look for the next one."""
    rows = Sizes(((200, 64), (300, 64)), 16, 2, 2, 64, torch.float32, torch.float32, 0.0)
    case = Case(make(rows), rows, of_heads=False, biased=False)
    case.at_once()
    wait_until_asleep()


def test_a_position_without_cosines_leaves_the_step_undone(case: Case) -> None:
    decoder = case.compiled()
    kept = [k.clone() for k, _ in case.pools]
    case.positions[1] = POSITIONS
    step = decoder.prepare(case.embedded, case.positions, case.groups, 0.5)
    assert not decoder.run(step, 0, LAYERS)
    for (keys, _), before in zip(case.pools, kept, strict=True):
        torch.testing.assert_close(keys, before, rtol=0, atol=0, equal_nan=True)


def test_a_unit_that_the_pool_does_not_have(case: Case) -> None:
    stacked = case.groups[0].stacked
    groups = stacked._replace(units=stacked.units + 10**6).layouts()
    with pytest.raises(ValueError, match=r"^unit 10000"):
        case.compiled().prepare(case.embedded, case.positions, groups, 0.5)


def test_more_rows_than_it_has_room_for(case: Case) -> None:
    decoder = case.compiled()
    embedded = torch.randn(decoder.most_rows + 1, HIDDEN)
    positions = torch.zeros(len(embedded), dtype=torch.int64)
    for rows in (embedded, embedded[:1]):
        with pytest.raises(ValueError, match=rf"^{len(rows)} rows of 2, at most 512$"):
            decoder.prepare(rows, positions, case.groups, 0.5)


UP = ProductWeights(torch.randn(2 * INNER, HIDDEN), None)
DOWN = ProductWeights(torch.randn(HIDDEN, INNER), None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mlp": (UP, ProductWeights(torch.randn(HIDDEN + 1, INNER), None))}, "down: "),
        ({"qkv": ProductWeights(torch.randn(7, HIDDEN), None)}, "qkv: "),
        ({"out": ProductWeights(torch.randn(64, HIDDEN).T, None)}, "out: not contiguous"),
        ({"mlp": (ProductWeights(UP.weight.bfloat16(), None), DOWN)}, "gate and"),
        ({"mlp": (ProductWeights(torch.randn(64, HIDDEN), None),
                  ProductWeights(torch.randn(HIDDEN, 32), None))}, "MLPs of 32 and 80 elements"),
        ({"qkv": ProductWeights(torch.randn(128, HIDDEN), torch.randn(3))}, "bias of qkv: "),
        ({"input_norm": NormWeights(torch.randn(HIDDEN).double(), 1e-6)}, "input norm: "),
        ({"query_norm": NormWeights(torch.randn(16), 1e-6)}, "not of both"),
        ({"cosines": torch.randn(POSITIONS, 18)}, "18 elements of heads of 16"),
        ({"cosines": torch.randn(POSITIONS - 1, 16)}, "different numbers of positions"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_named(
    case: Case, changed: dict[str, object], message: str
) -> None:
    case.layers[1] = replace(case.layers[1], **changed)  # type: ignore[arg-type]  # its fields are of several types
    with pytest.raises(ValueError, match=message):
        case.compiled()
