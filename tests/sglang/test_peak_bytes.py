"""The peak of what tensors take, by hand."""

from __future__ import annotations

import torch

from ellm_sgl.sglang.peak_bytes import peak_bytes

KB = 1 << 10


def test_of_what_lives_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            a = torch.empty(100 * KB, dtype=torch.uint8)
            b = torch.empty_like(a)  # 200 KB live at once
            del a
            c = torch.empty(50 * KB, dtype=torch.uint8)
            del b, c

    assert peak_bytes(step) == 200 * KB


def test_of_what_functions_use_inside() -> None:
    a = torch.randn(64, 1024)
    # softmax of another type makes a copy first, which no Python code sees
    assert peak_bytes(lambda: torch.softmax(a, -1, dtype=torch.float64)) >= 2 * a.nbytes


def test_nothing_made_and_what_was_there_before_count_for_nothing() -> None:
    kept = [torch.empty(100 * KB)]
    assert peak_bytes(kept.clear) == 0
