"""The Triton kernel under Triton's interpreter. `test_triton.py` runs this file in a process of its
own: TRITON_INTERPRET=1 must be set before anything imports triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ellm_sgl.kernels import reference
from ellm_sgl.kernels.experimental.flashinfer.attention import append_by_pytorch
from ellm_sgl.kernels.experimental.triton.append import append
from ellm_sgl.kernels.experimental.triton.attention import FusedAttention
from ellm_sgl.kernels.experimental.triton.copy import BLOCK, copy_listed
from ellm_sgl.kernels.experimental.triton.graph import FusedGraphSteps
from ellm_sgl.kernels.layout import GroupLayout
from tests.kernels.cpu_steps import F16, F32, Inputs, Sizes, make

CPU = torch.device("cpu")
kernel = FusedAttention(CPU, programs=4)

STEPS = {
    "decode, grouped heads": Sizes(((40, 1), (7, 1), (0, 1)), 16, 2, 3, 32, F32, F32, 0.0),
    "decode, missing blocks": Sizes(((90, 1), (33, 1)), 16, 2, 2, 32, F32, F32, 0.5),
    "decode in chunks": Sizes(((1300, 1), (512, 1), (511, 1)), 16, 1, 4, 32, F32, F32, 0.01),
    "prompts": Sizes(((0, 70), (0, 3)), 16, 1, 2, 64, F32, F32, 0.0),
    "chunks of prompts": Sizes(((50, 40), (31, 2)), 16, 2, 1, 32, F32, F32, 0.3),
    "a short chunk far into a prompt": Sizes(((4300, 2),), 64, 1, 1, 16, F32, F32, 0.0),
    "everything": Sizes(((600, 1), (90, 40), (0, 35), (9, 1)), 16, 1, 2, 32, F32, F32, 0.1),
    "many heads in a group": Sizes(((20, 1), (0, 9)), 4, 1, 17, 32, F32, F32, 0.2),
    "blocks of one token": Sizes(((9, 1), (5, 4)), 1, 2, 1, 32, F32, F32, 0.4),
    "heads of 80": Sizes(((40, 1), (20, 11)), 8, 2, 2, 80, F32, F32, 0.2),
    # Not bf16: the interpreter multiplies its bits as integers.
    "heads of 128, fp16": Sizes(((100, 1), (20, 40)), 16, 2, 4, 128, F16, F16, 0.2),
}


def longest(inputs: Inputs) -> int:
    return max(request.new.end_position for request in inputs.layout.requests)


@pytest.mark.parametrize("name", STEPS)
def test_agrees_with_the_reference(name: str) -> None:
    inputs = make(STEPS[name])
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    out, *pool = inputs.run(kernel)
    tolerance = inputs.tolerance(longest(inputs))
    if inputs.q.dtype != F32:  # probabilities are rounded too, as in PyTorch's kernels
        tolerance *= 2
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0])
def test_delta_and_the_number_of_programs_change_no_bit(delta: float) -> None:
    inputs = make(STEPS["everything"])
    expected, _, _ = inputs.run(kernel)
    other = FusedAttention(CPU, programs=3)
    for _ in range(2):  # a launch leaves its counters as it found them
        out, _, _ = inputs.run(other, delta=delta)
        assert torch.equal(out, expected)


def test_only_the_rows_asked_for() -> None:
    inputs = make(STEPS["everything"])
    new_rows = sum(request.new.size for request in inputs.layout.requests)
    expected, _, _ = inputs.run(kernel)
    out, *pool = inputs.run(kernel, out_rows=new_rows)
    assert torch.equal(out, expected[:new_rows])
    # Where rows are recomputed by themselves (`step/separate.py`) the others have no query.
    out, *pool = replace(inputs, q=inputs.q[:new_rows]).run(kernel, out_rows=new_rows)
    assert torch.equal(out, expected[:new_rows])
    with pytest.raises(ValueError, match="the layout speaks of"):
        replace(inputs, q=inputs.q[: new_rows - 1]).run(kernel, out_rows=new_rows)
    _, *expected_pool = inputs.run(reference.mixed_attention)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


def consecutive(layout: GroupLayout, written: int) -> GroupLayout:
    """The same, told that the rows written are the first ones."""
    return GroupLayout(layout.stacked._replace(write_rows=slice(0, written)), layout.group)


def test_steps_at_fixed_addresses() -> None:
    """What a CUDA graph would replay: the same tensors, loaded anew before each step."""
    decoding = Sizes(((700, 1), (33, 1), (0, 1)), 16, 1, 2, 32, F32, F32, 0.0)
    steps = [make(decoding), make(replace(decoding, requests=((20, 1), (530, 1)), seed=1))]
    pool = steps[0].keys
    graph = FusedGraphSteps(FusedAttention(CPU, programs=2), 2, 4, 2 * len(pool), pool, heads=2)
    for inputs in (*steps, steps[0]):
        layout = consecutive(inputs.layout, inputs.layout.rows)
        assert graph.fits([layout, layout])
        expected, *expected_pool = inputs.run(reference.mixed_attention)
        graph.load([layout, layout], layout.rows + 1)
        keys, values = inputs.keys.clone(), inputs.values.clone()
        q, k, v = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (inputs.q, inputs.k, inputs.v)
        )
        out = graph.run(q, k, v, keys, values, 1, True, inputs.scale)
        rows = inputs.layout.rows
        torch.testing.assert_close(
            out[:rows], expected, rtol=0, atol=inputs.tolerance(longest(inputs))
        )
        assert not out[rows:].any(), "rows beyond the batch"
        stored = [x[1:] for x in (keys, values)]  # unit 0 is scratch
        torch.testing.assert_close(
            stored, [x[1:] for x in expected_pool], rtol=0, atol=0, equal_nan=True
        )


def test_steps_that_no_graph_computes() -> None:
    pool = make(STEPS["everything"]).keys
    graph = FusedGraphSteps(FusedAttention(CPU, programs=2), 1, 4, 40, pool, heads=2)
    assert not graph.fits([make(STEPS["everything"]).layout])
    assert not graph.fits([make(STEPS["decode, missing blocks"]).layout])
    long = make(Sizes(((800, 1),), 16, 1, 2, 32, F32, F32, 0.0)).layout
    assert not graph.fits([consecutive(long, 1)]), "51 blocks"


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_reference_on_random_steps(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=random))]

    requests = tuple((pick(0, 5, 64, 130), pick(1, 1, 2, 33)) for _ in range(pick(1, 2, 4)))
    sizes = Sizes(
        requests, pick(1, 7, 16), pick(1, 2), pick(1, 2, 5), pick(16, 40), F32, F32, 0.2, seed
    )
    inputs = make(sizes)
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    out, *pool = inputs.run(kernel, delta=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=inputs.tolerance(longest(inputs)))
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("elements", [6, BLOCK, 2 * BLOCK + 2])
def test_copies_the_units_listed_and_no_others(elements: int) -> None:
    """Units of less than a part, of one, and of two and a bit; of 16 bits, as pools are."""
    source = torch.randint(0, 99, (9, 2, 2 * elements), dtype=torch.int16)
    target = torch.full_like(source, -1)
    lists = torch.tensor([[3, 7, 1, 5, 6], [8, 0, 8, 2, 4]])
    for count in (0, 1, 3, 4):
        expected = target.clone()
        expected[lists[0, :count]] = source[lists[1, :count]]
        copy_listed(target, source, lists[0], lists[1], torch.tensor([count]))
        assert torch.equal(target, expected)


@pytest.mark.parametrize("name", ["chunks of prompts", "heads of 80", "blocks of one token"])
def test_appends_kv_as_pytorch_does(name: str) -> None:
    inputs = make(STEPS[name])
    layout, pools = inputs.layout, []
    places = layout.write_units, layout.write_offsets
    for appends in (append, append_by_pytorch):
        keys, values = inputs.keys.clone(), inputs.values.clone()
        appends(inputs.k[layout.write_rows], inputs.v[layout.write_rows], keys, values, *places)
        pools.append((keys, values))
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(pools[0][0].nan_to_num(), inputs.keys.nan_to_num())
