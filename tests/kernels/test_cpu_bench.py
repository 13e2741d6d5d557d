"""The benchmark compares like with like: all kernels of a case compute the same attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ellm_sgl.kernels import bench, bench_operators, bench_products, reference
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.cpu.library import load

pytestmark = pytest.mark.skipif(load().library is None, reason=load().problem or "built")

DECODE = bench.Case("decode", 3, 90, 1, 4, 2, 32, "float32")


def test_every_case_has_its_peers_and_positive_figures() -> None:
    for case in (
        DECODE,
        replace(DECODE, name="prefill", batch=1, new=90),
        replace(DECODE, name="mixed", missing=0.4),
    ):
        result = bench.measure(case, rounds=1)
        assert result.milliseconds.keys() >= {"cpu", "torch_paged", "read", "multiply"}
        assert min(*result.milliseconds.values(), *result.ratio.values()) > 0
        assert result.to_json()["case"]["name"] == case.name


def test_two_passes_compute_what_the_mixed_pass_does() -> None:
    case = replace(DECODE, name="mixed", missing=0.4)
    step, everything = bench.step_of(case), slice(0, None)
    mixed = step.run(cpu.mixed_attention, step.mixed, everything)
    expected = step.run(reference.mixed_attention, step.mixed, everything)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)
    bench.peers(case, step)["cpu, two passes"]()  # leaves the recomputed KV in the pool
    decoded = step.run(cpu.mixed_attention, step.decode, slice(0, step.new))
    torch.testing.assert_close(decoded, mixed[: step.new], rtol=0, atol=1e-5)


def test_limits_of_the_machine() -> None:
    limits = bench.machine_limits(rounds=1)
    assert set(limits) == {"read", "copy", "multiply float32", "multiply bfloat16"}
    assert min(limits.values()) > 0


def test_products_have_their_peers_and_positive_figures() -> None:
    for dtype in ("float32", "bfloat16"):
        result = bench_products.measure(bench_products.Case(3, 40, 64, dtype), rounds=1)
        assert result.milliseconds.keys() >= {"cpu", "linear", "read"}
        assert min(*result.milliseconds.values(), *result.ratio.values(), result.read_share) > 0
        assert result.to_json()["case"]["rows"] == 3


def test_operators_have_positive_figures() -> None:
    for name in ("norm", "rope", "gate"):
        case = bench_operators.Case(name, 3, 64, 32, "bfloat16")
        result = bench_operators.measure(case, rounds=1)
        assert result.microseconds.keys() == {"cpu", "operators"}
        assert min(*result.microseconds.values(), result.ratio) > 0
        assert result.to_json()["case"]["name"] == name
    models = {(case.size, case.dtype) for case in bench_operators.cases()}
    assert {(192, "float32"), (8192, "bfloat16")} <= models
