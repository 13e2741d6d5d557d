"""The GPU benchmark compares like with like: its three forms of a step are the same attention."""

from __future__ import annotations

import pytest
import torch

from ellm_sgl.kernels import reference, torch_paged
from ellm_sgl.kernels.bench_step import StepShape
from ellm_sgl.kernels.experimental import bench_gpu
from tests.kernels import flashinfer_stand_in

CASE = StepShape(batch=2, context=70, missing=0.5, heads=4, kv_heads=2, head_dim=64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_all_forms_decode_the_same(missing: float) -> None:
    case = StepShape(**{**vars(CASE), "missing": missing})
    setting = bench_gpu.step_of(case, CPU)
    mixed = setting.run(reference.mixed_attention, setting.mixed, slice(0, None))
    apart = setting.run_apart(torch_paged.mixed_attention)
    torch.testing.assert_close(apart, mixed[: case.batch], rtol=0, atol=2e-2)
    assert setting.mixed.rows == case.batch * (1 + 32 * (missing > 0))
    assert setting.flops > 0 and setting.kv_bytes == 2 * 70 * 2 * 2 * 64 * 2


def test_flashinfer_is_given_the_same_step() -> None:
    """Planned for FlashInfer, carried out in PyTorch."""
    setting = bench_gpu.step_of(CASE, CPU)
    expected = setting.run_apart(torch_paged.mixed_attention)
    runs = bench_gpu.whole_flashinfer(setting, flashinfer_stand_in)
    assert set(runs) == {"flashinfer, apart", "flashinfer POD"}
    for run in runs.values():
        torch.testing.assert_close(run(), expected, rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_case_has_its_peers_and_they_agree() -> None:
    limits = {"copy GB/s": 1000.0, "TFLOP/s": 100.0}
    for missing in (0.0, 0.4):
        case = StepShape(4, 1024, missing, 8, 2)
        result = bench_gpu.measure(case, 1, limits)
        assert result.milliseconds.keys() >= {"fused 512", "fused, apart"}
        assert result.largest_difference < 2e-2
        assert result.best_delta in bench_gpu.DELTAS
