"""FlashInfer is told the right thing: its plans, carried out in plain PyTorch, are attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ellm_sgl.kernels import reference, torch_paged
from ellm_sgl.kernels.choose import choose_graph_steps
from ellm_sgl.kernels.experimental.cuda import DividedAttention
from ellm_sgl.kernels.experimental.flashinfer.attention import FlashInferAttention
from ellm_sgl.kernels.experimental.flashinfer.graph import FlashInferGraphSteps
from ellm_sgl.kernels.experimental.flashinfer.plan import divide
from ellm_sgl.kernels.layout import GroupLayout
from tests.kernels import flashinfer_stand_in
from tests.kernels.attention_inputs import AttentionInputs, attention_inputs
from tests.kernels.cpu_steps import F32, Sizes, in_two_groups, make, sizes

CPU = torch.device("cpu")
kernel = FlashInferAttention(CPU, flashinfer_stand_in)
TOLERANCE = 1e-5
"""fp32 values of a few units, partial results and log-sum-exps rounded to fp32."""
DECODING = Sizes(((700, 1), (33, 1), (0, 1)), 16, 1, 2, 32, F32, F32, 0.0)


def recorded(calls: list[GroupLayout]) -> Any:
    """The fused kernel's stand-in: what it computes, and a note of each call."""

    def run(q: Any, k: Any, v: Any, keys: Any, values: Any, layout: Any, *rest: Any) -> Any:
        calls.append(layout)
        return torch_paged.mixed_attention(q, k, v, keys, values, layout, *rest)

    return run


@settings(max_examples=40)
@given(inputs=attention_inputs(((F32, F32),)))
def test_rows_are_recomputed_by_the_fused_kernel_alone(inputs: AttentionInputs) -> None:
    """And both compute what the reference does."""
    fused: list[GroupLayout] = []
    divided = DividedAttention(kernel, recorded(fused))
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    for _ in range(2):
        out, *pool = inputs.run(divided)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)
    recomputes = any(request.spans for request in inputs.layout.requests)
    assert fused == [inputs.layout] * (2 if recomputes else 0)


@settings(max_examples=25)
@given(sizes=sizes())
def test_agrees_with_the_reference_on_any_sizes(sizes: Sizes) -> None:
    inputs = make(replace(sizes, row_type=F32, pool_type=F32, head_dim=32, missing=0.0))
    expected, _, _ = inputs.run(reference.mixed_attention)
    out, _, _ = inputs.run(kernel)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


def test_many_heads_are_merged_in_several_rows() -> None:
    inputs = make(Sizes(((20, 5),), 16, 1, 48, 256, F32, F32, 0.0))
    expected, _, _ = inputs.run(reference.mixed_attention)
    out, _, _ = inputs.run(kernel)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


def test_a_decoded_token_needs_only_pages() -> None:
    layout = make(Sizes(((40, 1), (16, 1), (15, 1)), 16, 1, 1, 32, F32, F32, 0.0)).layout
    division = divide(layout.requests, 16)
    assert division.decode_rows.tolist() == [0, 1, 2]
    assert division.decode.indptr.tolist() == [0, 3, 5, 6]
    assert division.decode.last_tokens.tolist() == [9, 1, 16]
    assert len(division.rows) == division.resident_rows == 0


def test_it_refuses_rows_that_are_recomputed() -> None:
    inputs = make(Sizes(((90, 1),), 16, 1, 2, 32, F32, F32, 1.0))
    with pytest.raises(ValueError, match="use the fused kernel"):
        inputs.run(kernel)


def test_layer_groups_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the numbers of their pages differ."""
    plans = 0
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ):
        wrapper = getattr(flashinfer_stand_in, name)

        def plan(self: Any, *args: Any, plan: Any = wrapper.plan, **options: Any) -> None:
            nonlocal plans
            plans += 1
            plan(self, *args, **options)

        monkeypatch.setattr(wrapper, "plan", plan)
    own = FlashInferAttention(CPU, flashinfer_stand_in)
    for inputs, layout in in_two_groups(replace(DECODING, requests=((40, 1), (50, 20), (0, 9)))):
        for _ in range(2):  # layers of a group
            here = replace(inputs, layout=layout)
            expected, _, _ = here.run(reference.mixed_attention)
            out, _, _ = here.run(own)
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
    assert plans == 3


def test_steps_at_fixed_addresses() -> None:
    """What a CUDA graph would replay: the same tensors, loaded anew before each step, and more rows
    than requests."""
    other = replace(DECODING, requests=((20, 1), (530, 1)))
    steps = [in_two_groups(DECODING), in_two_groups(other)]
    most = max(len(inputs.keys) for inputs, _ in steps[0])
    divided = DividedAttention(kernel, torch_paged.mixed_attention)
    graph = choose_graph_steps(divided, 2, 4, most, steps[0][0][0].keys, heads=2)
    for rows in (4, 3):
        graph.capture(rows)
    for step, rows in ((steps[0], 4), (steps[1], 3), (steps[1], 4), (steps[0], 3)):
        layouts = [layout for _, layout in step]
        assert graph.fits(layouts)
        graph.load(layouts, rows)
        for group, (inputs, layout) in enumerate(step):
            here = replace(inputs, layout=layout)
            expected, *expected_pool = here.run(reference.mixed_attention)
            keys, values = inputs.keys.clone(), inputs.values.clone()
            new = len(inputs.q)
            beyond = (0, 0, 0, 0, 0, rows - new)
            q, k, v = (torch.nn.functional.pad(x, beyond) for x in (inputs.q, inputs.k, inputs.v))
            for first_layer in (True, False):
                out = graph.run(q, k, v, keys, values, group, first_layer, inputs.scale)
                torch.testing.assert_close(out[:new], expected, rtol=0, atol=TOLERANCE)
            stored = [x[1:] for x in (keys, values)]  # unit 0 is scratch
            torch.testing.assert_close(
                stored, [x[1:] for x in expected_pool], rtol=0, atol=0, equal_nan=True
            )


def test_steps_that_no_graph_computes() -> None:
    (inputs, first), (_, second) = in_two_groups(DECODING)

    def graph_steps(most_blocks: int) -> FlashInferGraphSteps:
        return FlashInferGraphSteps(kernel, 2, 4, most_blocks, inputs.keys, heads=2)

    assert not graph_steps(40).fits([first, second])
    graph = graph_steps(len(inputs.keys))
    assert graph.fits([first, second])
    assert not graph.fits([first, make(DECODING).layout]), "groups that differ"
    prompt = [layout for _, layout in in_two_groups(replace(DECODING, requests=((5, 2),)))]
    assert not graph.fits(prompt)
