"""The run for a lent machine: what can go wrong without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ellm_sgl.eval import gpu
from ellm_sgl.eval.nvml import Sampler
from ellm_sgl.serve.cli_kernels import bench
from ellm_sgl.sglang.calibration import shape_of
from ellm_sgl.sglang.platform.torchvision_ops import declare


def test_both_servers_have_as_much_memory() -> None:
    servers = gpu.servers("MODEL", 2.0)
    tokens = servers["stock"][-1]
    assert int(tokens) * gpu.TOKEN_BYTES == pytest.approx(2e9, rel=0.01)
    ellm = dict(zip(servers["ellm"], servers["ellm"][1:], strict=False))
    assert ellm["--ellm-device-kv-tokens"] == tokens
    assert int(ellm["--ellm-host-kv-tokens"]) == gpu.HOST_SHARE * int(tokens)
    unlimited = gpu.servers("MODEL", None)
    assert not any("tokens" in argument for servers in unlimited.values() for argument in servers)


def test_the_model_is_llama_2_13b_in_shape(tmp_path: Path) -> None:
    declare()
    (tmp_path / "config.json").write_text(json.dumps(gpu.LLAMA_2_13B))
    shape = shape_of(str(tmp_path), "bfloat16")
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.kv_bytes
    assert per_token == gpu.TOKEN_BYTES
    assert (shape.hidden, shape.intermediate, shape.heads) == (5120, 13824, 40)


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "device", lambda: {"name": "none"})
    monkeypatch.setattr(gpu, "sampler", lambda: Sampler("GPU-none"))
    monkeypatch.setattr(gpu, "run_tests", lambda: {"ok": True})
    monkeypatch.setattr(gpu, "run_bench", lambda: gpu._command("-c", "print('no JSON'); exit(3)"))
    out, said = tmp_path / "gpu.json", list[str]()
    assert gpu.measure(out, ("tests",), (), said.append)
    assert not gpu.measure(out, ("bench",), (), said.append)
    found = json.loads(out.read_text())
    assert found["tests"] == {"ok": True}
    assert found["bench"].pop("device")["samples"] == 0
    assert found["bench"] == {"ok": False, "said": ["no JSON"]}
    assert said[-1] == "bench: FAILED"


def test_the_folders_with_tests_for_a_device_are_there() -> None:
    marked = {
        path.parent.relative_to(gpu.ROOT).as_posix()
        for path in (gpu.ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked == {*gpu.GPU_TESTS, *gpu.ALONE}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence() -> None:
    answer = CliRunner().invoke(gpu.main, ["--out", "/nowhere/gpu.json"])
    assert answer.exit_code == 1 and "no CUDA device" in answer.output
    answer = CliRunner().invoke(bench, ["--device", "cuda", "--json"])
    assert answer.exit_code == 1 and "--device cuda" in answer.output


@pytest.mark.parametrize(
    ("failed", "integrity", "ok"), [(0, "ok", True), (1, "ok", False), (0, "unit 3 twice", False)]
)
def test_a_server_that_fails_requests_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, failed: int, integrity: str, ok: bool
) -> None:
    run = {"server": "ellm", "summary": {"failed": failed}, "state": {"integrity": integrity}}
    monkeypatch.setattr(gpu, "serve", lambda *_: [run])
    assert gpu.run_serve([2.0])["ok"] is ok
