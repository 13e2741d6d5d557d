"""The fused Triton kernel: in the interpreter, and compiled for devices that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from ellm_sgl.kernels.experimental.triton.attention import (
    PROGRAMS_PER_PROCESSOR,
    k1_programs,
)
from ellm_sgl.kernels.experimental.triton.plan import DECODE_CHUNK, Tiles, TileSizes, cut
from ellm_sgl.kernels.layout import RowRange
from tests.kernels.compiled_for_devices import compile_for, ptx_of_copies
from tests.kernels.cpu_steps import Sizes, make, sizes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_agrees_with_the_reference_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    tests = Path(__file__).with_name("triton_interpreted.py")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "programs"), [(80, "bf16", 2), (90, "bf16", 2), (80, "fp32", 1)]
)
def test_compiles_for_devices_that_are_not_there(
    capability: int, dtype: str, programs: int
) -> None:
    """So many programs fit a processor; in 16 bits nothing spills."""
    found = compile_for(capability, dtype, kv_heads=8, group=4, head_dim=128)
    assert programs * found.registers * found.threads <= 65536
    shared = {80: 164 << 10, 90: 228 << 10}[capability]
    assert programs * (found.shared_bytes + 1024) <= shared
    if dtype == "bf16":
        assert found.spilled_bytes == 0
        assert programs == PROGRAMS_PER_PROCESSOR


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_that_move_kv_do_so_16_bytes_at_a_time(capability: int) -> None:
    for name, ptx in ptx_of_copies(capability).items():
        moved = re.findall(r"(?:ld|st)\.global\S*\.v(\d)\.b(\d+)", ptx)
        assert len(moved) >= 4, name
        assert all(int(count) * int(bits) == 128 for count, bits in moved), name


@given(inputs=sizes())
def test_tiles_cover_every_row_and_all_that_it_sees_once(inputs: Sizes) -> None:
    layout = make(inputs).layout
    tile_sizes = TileSizes.of(inputs.group)
    tiles = cut(layout.requests, tile_sizes)
    ranges = [rows for r in layout.requests for rows in (r.new, *r.spans)]
    _check_cover(tiles, ranges, layout.rows)
    recompute, decode = tiles.fields[: tiles.recompute], tiles.fields[tiles.recompute :]
    assert (recompute[:, 1] * inputs.group <= tile_sizes.recompute).all()
    assert (decode[:, 1] == 1).all()
    assert (decode[:, 4] - decode[:, 3] <= DECODE_CHUNK).all()


def _check_cover(tiles: Tiles, ranges: list[RowRange], rows: int) -> None:
    seen = np.zeros((rows, max(r.end_position for r in ranges)), int)
    for row, tokens, position, start, end, *_ in tiles.fields:
        assert start < end
        for i in range(tokens):
            seen[row + i, start : min(end, position + i + 1)] += 1
    for own in ranges:
        for i in range(own.size):
            end = own.position + i + 1
            assert (seen[own.row + i, :end] == 1).all()
            assert (seen[own.row + i, end:] == 0).all()


@given(inputs=sizes())
def test_partial_results_lie_side_by_side(inputs: Sizes) -> None:
    tile_sizes = TileSizes.of(inputs.group)
    tiles = cut(make(inputs).layout.requests, tile_sizes)
    taken = np.zeros(tiles.partial_rows, int)
    numbers: dict[int, list[int]] = {}
    for i, (*_, chunk, chunks, first, number) in enumerate(tiles.fields):
        if chunks > 1:
            size = tile_sizes.recompute if i < tiles.recompute else tile_sizes.decode
            taken[first + chunk * size : first + (chunk + 1) * size] += 1
            numbers.setdefault(int(number), []).append(int(chunk))
            assert chunk < chunks
    assert (taken == 1).all()
    assert sorted(numbers) == list(range(tiles.merged))
    assert all(sorted(n) == list(range(len(n))) for n in numbers.values())


def test_delta_is_a_number_of_programs() -> None:
    assert [k1_programs(d / 1024, 256) for d in (0, 32, 512, 992, 1024)] == [0, 8, 128, 248, 256]
    assert k1_programs(0.51, 264) == k1_programs(0.5, 264) == 132
    with pytest.raises(ValueError, match=r"1\.5"):
        k1_programs(1.5, 8)
