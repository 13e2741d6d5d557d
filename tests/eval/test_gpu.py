"""The run for a lent machine: what can go wrong without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
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
    assert found["tests"] == {"ok": True, "ran_on": {"name": "none"}}
    assert found["bench"].pop("ran_on") == {"name": "none"}
    assert found["bench"].pop("device")["samples"] == 0
    assert found["bench"] == {"ok": False, "said": ["no JSON"]}
    assert said[-1] == "bench: FAILED"


def test_a_server_that_dies_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(name: str, *_: object) -> list[dict[str, Any]]:
        if name == "ellm":
            error = httpx.ConnectError("connection refused")
            error.add_note("torch.OutOfMemoryError")
            raise error
        return [{"server": name, "summary": {"failed": 0}}]

    monkeypatch.setattr(gpu, "serve", serve)
    found = gpu.run_serve([2.0])
    assert not found["ok"]
    stock, ellm = found["served"]
    assert stock["server"] == "stock"
    assert ellm["failed"] == "connection refused\ntorch.OutOfMemoryError"


def test_servers_of_another_call_stay_with_what_they_ran_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu, "serve", lambda name, _, budget: [{"budget_gb": budget, "summary": {"failed": 0}}]
    )
    out = tmp_path / "gpu.json"
    for name, budgets in {"H100": [8.0, 0.0], "H200": [2.0], "L4": [8.0]}.items():
        monkeypatch.setattr(gpu, "device", lambda name=name: {"name": name})
        gpu.measure(out, ("serve",), budgets, lambda _: None)
    served = json.loads(out.read_text())["serve"]["served"]
    told = {run["budget_gb"]: run["ran_on"]["name"] for run in served}
    assert told == {None: "H100", 2.0: "H200", 8.0: "L4"} and len(served) == 6


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
