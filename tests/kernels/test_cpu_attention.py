"""The C++ attention agrees with the reference on every instruction set, to the bit with itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ellm_sgl.kernels import reference
from ellm_sgl.kernels.cpu.attention import mixed_attention, supports
from ellm_sgl.kernels.cpu.build import find_compiler
from ellm_sgl.kernels.cpu.library import load
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.memory import NONE
from tests.kernels.attention_inputs import AttentionInputs, attention_inputs, make_inputs
from tests.kernels.cpu_steps import BF16, F32, TYPES, Inputs, Sizes, make, sizes

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

# The environment says which instruction set runs; it stays the same for all examples of a test.
random_steps = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(inputs: Any, tolerance: float, **options: Any) -> None:
    expected, *expected_pool = inputs.run(reference.mixed_attention)
    out, *pool = inputs.run(mixed_attention, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)


def longest(inputs: Inputs) -> int:
    return max(request.new.end_position for request in inputs.layout.requests)


@random_steps
@given(inputs=attention_inputs(TYPES))
def test_agrees_with_the_reference_on_random_steps(isa: str, inputs: AttentionInputs) -> None:
    tokens = Inputs(
        inputs.q, inputs.k, inputs.v, inputs.keys, inputs.values, inputs.layout, inputs.scale
    )
    check(inputs, tokens.tolerance(longest(tokens)))


@pytest.mark.slow
@random_steps
@example(sizes=Sizes(((79, 1),), 1, 1, 2, 80, F32, F32, 0.0), count=1, delta=0.5)
@given(sizes=sizes(), count=st.integers(1, 4), delta=st.sampled_from((0.0, 0.3, 0.5, 1.0)))
def test_agrees_with_the_reference_on_any_sizes(
    isa: str, sizes: Sizes, count: int, delta: float
) -> None:
    inputs = make(sizes)
    with threads(count):
        check(inputs, inputs.tolerance(longest(inputs)), delta=delta)


def test_many_rows_and_much_missing(isa: str) -> None:
    inputs = make(Sizes(((700, 1), (90, 70), (0, 130), (333, 1)), 16, 2, 3, 64, F32, F32, 0.4))
    with threads(3):
        check(inputs, inputs.tolerance(longest(inputs)))


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (5, 256), (16, 64)])
def test_heads_of_their_own_whose_rows_fill_a_page(isa: str, heads: int, head_dim: int) -> None:
    """A way of its own through decode rows: kernels/cpu/rows.h."""
    steps = ((700, 1), (90, 70), (33, 1), (1, 1), (64, 1))
    inputs = make(Sizes(steps, 16, heads, 1, head_dim, F32, F32, 0.3))
    with threads(2):
        check(inputs, inputs.tolerance(longest(inputs)))


def test_groups_that_are_alike_are_prepared_at_once(isa: str) -> None:
    inputs = make(Sizes(((40, 1), (90, 70), (5, 1)), 16, 2, 2, 64, F32, F32, 0.0))
    layout, moved = inputs.layout, torch.randperm(len(inputs.keys) - 1) + 1
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), moved])  # unit 0 is in no group
    stacked = layout.stacked._replace(
        units=torch.stack([layout.units, moved[layout.units]]),
        write_units=torch.stack([layout.write_units, moved[layout.write_units]]),
    )
    first, second = stacked.layouts()
    keys, values = torch.empty_like(inputs.keys), torch.empty_like(inputs.values)
    keys[moved], values[moved] = inputs.keys, inputs.values
    elsewhere = replace(inputs, keys=keys, values=values, layout=second)
    out, *pool = inputs.run(mixed_attention)
    for group in (replace(inputs, layout=first), elsewhere, replace(inputs, layout=first)):
        same, keys, values = group.run(mixed_attention)
        assert torch.equal(same, out)
        at = moved if group is elsewhere else slice(None)
        torch.testing.assert_close([keys[at], values[at]], pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [(2, 2, 64, F32), (8, 1, 128, F32), (2, 12, 64, BF16), (3, 4, 96, BF16)],
)
def test_the_same_to_the_bit_however_the_work_is_divided(
    isa: str, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, shared: float
) -> None:
    steps = ((2000, 1), (900, 70), (5, 1), (0, 90), (700, 1))
    inputs = make(Sizes(steps, 16, kv_heads, group, head_dim, dtype, dtype, 0.1))
    with threads(1):
        alone, _, _ = inputs.run(mixed_attention)
    with threads(4):
        for _ in range(5):
            together, _, _ = inputs.run(mixed_attention, delta=shared)
            assert torch.equal(alone, together)


@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (1, 16), (2, 12), (1, 11), (3, 1)])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(32, 16), (96, 7), (128, 48), (256, 1)])
def test_decoded_rows_of_bf16_agree_with_the_reference(
    isa: str, kv_heads: int, group: int, head_dim: int, block_tokens: int
) -> None:
    """By a matrix unit, too (decode_amx.h): heads that go together, tokens wherever they lie."""
    rows = ((700, 1), (16, 1), (1, 1), (47, 1))
    inputs = make(Sizes(rows, block_tokens, kv_heads, group, head_dim, BF16, BF16, 0.1))
    with threads(2):
        check(inputs, inputs.tolerance(700))


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 32), (4, 4, 96)])
def test_ranges_are_the_same_to_the_bit_in_items_of_any_width(
    isa: str, kv_heads: int, group: int, head_dim: int
) -> None:
    """How many columns an item has depends on the threads (run.cpp, `add_tiles`)."""
    inputs = make(Sizes(((37, 300), (0, 45)), 7, kv_heads, group, head_dim, BF16, BF16, 0.1))
    with threads(1):
        check(inputs, inputs.tolerance(337))
        alone, _, _ = inputs.run(mixed_attention)
    for count in (4, 16):
        with threads(count):
            together, _, _ = inputs.run(mixed_attention)
            assert torch.equal(alone, together)


@random_steps
@given(inputs=attention_inputs(TYPES))
def test_new_rows_come_out_the_same_to_the_bit_as_with_nothing_missing(
    isa: str, inputs: AttentionInputs
) -> None:
    step, table = inputs.step, inputs.step.table
    everything = np.flatnonzero(table.references(range(table.num_blocks + 1)))
    table.place(everything.tolist())
    assert not (table.units[everything] == NONE).any()
    complete = replace(
        step, resident=table.units.copy(), depths=tuple(np.zeros_like(d) for d in step.depths)
    )
    cached = make_inputs(complete, inputs.group, inputs.heads, inputs.q.dtype, inputs.keys.dtype)
    out, _, _ = inputs.run(mixed_attention)
    expected, _, _ = cached.run(mixed_attention)
    assert torch.equal(out[: cached.layout.rows], expected)


def test_rows_cut_from_one_qkv_tensor(isa: str) -> None:
    inputs = make(Sizes(((300, 1), (40, 20)), 16, 2, 2, 32, BF16, BF16, 0.0))
    packed = torch.cat([x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)], dim=1)
    q, k, v = packed.split([4 * 32, 2 * 32, 2 * 32], dim=1)
    cut = replace(inputs, q=q.view(-1, 4, 32), k=k.view(-1, 2, 32), v=v.view(-1, 2, 32))
    assert not cut.k.is_contiguous()
    assert torch.equal(cut.run(mixed_attention)[0], inputs.run(mixed_attention)[0])


def test_the_pool_of_one_layer_among_several() -> None:
    inputs = make(Sizes(((100, 3),), 16, 2, 2, 32, F32, F32, 0.0))
    pool = torch.full((len(inputs.keys), 3, 2, *inputs.keys.shape[1:]), torch.nan)
    pool[:, 1, 0], pool[:, 1, 1] = inputs.keys, inputs.values
    out = mixed_attention(
        inputs.q, inputs.k, inputs.v, pool[:, 1, 0], pool[:, 1, 1], inputs.layout, inputs.scale
    )
    expected, keys, values = inputs.run(mixed_attention)
    assert torch.equal(out, expected)
    torch.testing.assert_close(pool[:, 1, 0], keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pool[:, 1, 1], values, rtol=0, atol=0, equal_nan=True)
    assert pool[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("tokens", [512 * 16, 512 * 128 + 700])
def test_long_rows_are_merged_the_same_whoever_merges(isa: str, tokens: int) -> None:
    """Head by head where a row has many work items, which grow where it has very many."""
    inputs = make(Sizes(((tokens, 1), (tokens - 513, 1), (40, 1)), 512, 1, 3, 32, F32, F32, 0.0))
    with threads(3):
        check(inputs, inputs.tolerance(longest(inputs)))
        together, *_ = inputs.run(mixed_attention)
    with threads(1):
        assert torch.equal(inputs.run(mixed_attention)[0], together)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_tokens"),
    # More query heads to a KV head than a matrix unit takes at once: in equal parts, or one by one.
    [
        (4, 1, 64, 16),
        (2, 3, 64, 16),
        (1, 8, 64, 16),
        (1, 16, 32, 16),
        (2, 12, 96, 7),
        (1, 11, 128, 16),
    ],
)
@pytest.mark.parametrize("factor", [1, 6])
def test_rows_of_bf16_round_alike_decoded_and_in_ranges(
    isa: str, kv_heads: int, group: int, head_dim: int, block_tokens: int, factor: int
) -> None:
    """Where weights are rounded to bf16, both kernels round them to the same digits, so that what
    is computed again is what was decoded: but where a sum's last bit turns the scale, 1 element in
    1,000; with weights that are rounded to other digits it is 1 in 4 to 1 in 2."""
    sizes = Sizes(((900, 100),), block_tokens, kv_heads, group, head_dim, BF16, BF16, 0.0)
    inputs = make(sizes)
    inputs = replace(inputs, q=inputs.q * factor)
    out, keys, values = inputs.run(mixed_attention)
    layout = inputs.layout
    rows, blocks = range(100), layout.requests[0].blocks
    one_each = GroupLayout.of(
        len(rows),
        tuple(RequestLayout(RowRange(i, 900 + i, 1), (), blocks, False) for i in rows),
        layout.units,
        layout.write_rows,
        layout.write_units,
        layout.write_offsets,
    )
    decoded, *_ = replace(inputs, keys=keys, values=values, layout=one_each).run(mixed_attention)
    assert (decoded != out).float().mean() < 0.004


def test_large_scores_neither_overflow_nor_vanish(isa: str) -> None:
    inputs = make(Sizes(((600, 1), (10, 20)), 16, 1, 2, 64, F32, F32, 0.0))
    inputs = replace(inputs, q=inputs.q * 100)
    # Scores of some hundreds: their own rounding, about 1e-5 of them, moves the weights.
    check(inputs, 2e-3)


def test_refuses_what_it_cannot_do() -> None:
    inputs = make(Sizes(((20, 1),), 4, 1, 1, 32, F32, F32, 0.0))
    assert not supports(32, torch.float64, torch.float64)
    assert not supports(30, F32, F32)
    assert supports(36, F32, F32)
    double = {name: getattr(inputs, name).double() for name in ("q", "k", "v", "keys", "values")}
    with pytest.raises(ValueError, match="float64"):
        replace(inputs, **double).run(mixed_attention)
    odd = {name: getattr(inputs, name)[..., :30] for name in ("q", "k", "v", "keys", "values")}
    with pytest.raises(ValueError, match="heads of 30"):
        replace(inputs, **odd).run(mixed_attention)
    with pytest.raises(ValueError, match="fewer rows or units"):
        replace(inputs, keys=inputs.keys[:2], values=inputs.values[:2]).run(mixed_attention)
    with pytest.raises(ValueError, match=r"float32, torch\.bfloat16 and torch\.float32"):
        replace(inputs, k=inputs.k.bfloat16()).run(mixed_attention)


NO_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
typedef int create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
  Dl_info from;  // std::thread's are the kernels' own; PyTorch's are OpenMP's
  dladdr(__builtin_return_address(0), &from);
  if (strstr(from.dli_fname, "libstdc++") || strstr(from.dli_fname, "libellm")) {
    fputs("denied", stderr);
    return EAGAIN;
  }
  return ((create *)dlsym(RTLD_NEXT, "pthread_create"))(t, a, f, x);
}
"""
ALONE = """
import torch
from ellm_sgl.kernels.cpu.attention import mixed_attention
from tests.kernels.cpu_steps import F32, Sizes, make
inputs = make(Sizes(((700, 300), (513, 1)), 16, 2, 8, 64, F32, F32, 0.3))
expected, *_ = inputs.run(mixed_attention)
torch.set_num_threads(2)
out, *_ = inputs.run(mixed_attention)
torch.set_num_threads(1)
print(torch.equal(out, expected))
"""


def test_where_there_may_be_no_more_threads_those_that_there_are_do_it_all(tmp_path: Path) -> None:
    """As where a container's limit of processes is reached."""
    source, library = tmp_path / "none.c", tmp_path / "none.so"
    source.write_text(NO_THREADS)
    compiler = find_compiler()[0].replace("g++", "gcc").replace("clang++", "clang")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, "True\n"), found.stderr
    assert "denied" in found.stderr
