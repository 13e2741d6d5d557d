"""Everything that needs a CUDA device, in one command: correctness, kernels, serving.

`python -m ellm_sgl.eval.gpu --out FILE [--part NAME ...] [--budget-gb N ...]` writes one JSON file
and keeps it up to date after every part, so that a run that is cut off has lost only what it was
doing. A part that fails is noted, with its last words, and the next one begins. What the device did
meanwhile, by NVML (`nvml.py`), stands beside each result.

- `tests`: the tests marked `gpu` (from a checkout);
- `verify`: `ellm-sgl verify` on a tiny model, bf16;
- `bench`: `ellm-sgl kernels bench --device cuda`;
- `serve`: a model of Llama-2-13B's shape with random weights, stock SGLang and eLLM, at each KV
  budget. A device that holds one such model holds no two: they run one after the other.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx

from ellm_sgl.client.process import ServerError, ServerProcess, stop_on_signals
from ellm_sgl.client.replay import Request, replay_to_end
from ellm_sgl.client.summary import summarize
from ellm_sgl.config.click_types import FiniteRange
from ellm_sgl.eval.bench.report import versions
from ellm_sgl.eval.nvml import Sampler
from ellm_sgl.eval.tiny_models import write
from ellm_sgl.sglang.cuda import EXPERIMENTAL

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS, ALONE = ("tests/kernels", "tests/step"), ("tests/memory",)
"""Folders with tests that need a device."""
MOST_WORKERS = 12
"""Test processes that share it; each takes 1 to 2 GB of its memory."""
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel", "nvidia-ml-py")
LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 40 * 2 * 40 * 128 * 2
"""KV of one token of that model."""
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, SECONDS = 32, 512, 256, 8.0
HOST_SHARE = 4
"""Tokens of the host tier, in multiples of the device's."""
PARTS = ("tests", "verify", "bench", "serve")


def device() -> dict[str, Any]:
    """What it ran on, and when."""
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "memory_gb": found.total_memory / 1e9,
        "processors": found.multi_processor_count,
        "capability": [found.major, found.minor],
        "driver_cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "versions": dict.fromkeys(PACKAGES) | versions(PACKAGES),
    }


def sampler() -> Sampler:
    """Of the device that all of it runs on."""
    import torch

    return Sampler(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def run_tests() -> dict[str, Any]:
    """The tests marked `gpu`, side by side, since they mostly wait for the compiler; and those that
    look at how much memory the device has left, alone."""
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    shared = _command("-m", "pytest", "-q", "-m", "gpu", "-n", str(workers), *GPU_TESTS)
    alone = _command("-m", "pytest", "-q", "-m", "gpu", *ALONE)
    return shared | {"ok": shared["ok"] and alone["ok"], "alone": alone}


def run_verify() -> dict[str, Any]:
    """`ellm-sgl verify` with this device's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        model = write("llama-gqa", Path(folder) / "llama-gqa")
        return _ellm_sgl("verify", "--model-path", str(model))


def run_bench() -> dict[str, Any]:
    """`ellm-sgl kernels bench --device cuda`."""
    return _ellm_sgl("kernels", "bench", "--device", "cuda")


def run_serve(budgets_gb: Sequence[float]) -> dict[str, Any]:
    """Stock SGLang and eLLM at each KV budget; 0 is all that is left."""
    served: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_2_13B))
        for budget in budgets_gb:
            for name, arguments in servers(folder, budget or None).items():
                try:
                    served += serve(name, arguments, budget or None)
                except (ServerError, httpx.HTTPError) as error:
                    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
                    served.append({"server": name, "budget_gb": budget, "failed": said})
    return {"ok": all(map(_served_well, served)), "served": served}


def _served_well(run: Mapping[str, Any]) -> bool:
    """Whether a server started, answered every request, and eLLM's page table is whole."""
    whole = run.get("state", {}).get("integrity", "ok") == "ok"
    return "failed" not in run and run["summary"]["failed"] == 0 and whole


def servers(model: str, budget_gb: float | None) -> dict[str, list[str]]:
    """Arguments of each server. Both have as much KV memory."""
    common = ["--model-path", model, "--load-format", "dummy", "--dtype", "bfloat16",
              "--skip-tokenizer-init", "--disable-radix-cache",
              "--cuda-graph-max-bs-decode", str(REQUESTS)]  # fmt: skip
    stock = [*common, "--attention-backend", "flashinfer"]
    ellm = [*common, "--ellm-policy", "fcfs"]
    if budget_gb is not None:
        tokens = int(budget_gb * 1e9 / TOKEN_BYTES) // 16 * 16
        stock += ["--max-total-tokens", str(tokens)]
        ellm += ["--ellm-device-kv-tokens", str(tokens)]
        ellm += ["--ellm-host-kv-tokens", str(HOST_SHARE * tokens)]
    return {"stock": stock, "ellm": ellm}


def serve(name: str, arguments: Sequence[str], budget_gb: float | None) -> list[dict[str, Any]]:
    """One server: warmed up, then loaded with lengths that it may, and may not, rely on (`exact`).

    `state` is eLLM's counters, `device` the sampler's summary. `budget_gb`: KV memory; None: all
    that is left.
    """
    served = []
    with ServerProcess(arguments, {EXPERIMENTAL: "1"}) as server:
        replay_to_end(server.url, requests(exact=True, seed=0)[:4])
        for exact in (True, False):
            with sampler() as beside:
                summary = asdict(summarize(replay_to_end(server.url, requests(exact, seed=1))))
            state = server.state() if name == "ellm" else {}
            served.append({"server": name, "budget_gb": budget_gb, "exact": exact,
                           "summary": summary, "state": state,
                           "device": beside.summary()})  # fmt: skip
    return served


def requests(exact: bool, seed: int) -> list[Request]:
    """Requests of one size, arriving over some seconds."""
    rng = random.Random(seed)
    return [
        Request(
            at_s=at,
            prompt=tuple(rng.randrange(3, 32000) for _ in range(PROMPT_TOKENS)),
            output_tokens=OUTPUT_TOKENS,
            exact=exact,
        )
        for at in sorted(rng.uniform(0, SECONDS) for _ in range(REQUESTS))
    ]


def _ellm_sgl(*arguments: str) -> dict[str, Any]:
    return _command("-m", "ellm_sgl.serve.cli", *arguments, "--json")


def _command(*arguments: str) -> dict[str, Any]:
    """Run Python in a process of its own; its JSON, or its last words."""
    with sampler() as beside:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, EXPERIMENTAL: "1"},
            capture_output=True,
            text=True,
        )
    result: dict[str, Any] = {"ok": done.returncode == 0, "device": beside.summary()}
    try:
        result["report"] = json.loads(done.stdout)
    except json.JSONDecodeError:
        result["said"] = (done.stdout[-3000:] + done.stderr[-3000:]).splitlines()
    return result


def measure(
    out: Path, parts: Sequence[str], budgets_gb: Sequence[float], say: Callable[[str], None]
) -> bool:
    """Run the parts asked for; what `out` holds of others stays, and of servers those with other
    budgets. Each part says what it ran on. Returns whether all passed."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "tests": run_tests,
        "verify": run_verify,
        "bench": run_bench,
        "serve": lambda: run_serve(budgets_gb),
    }
    for part in parts:
        say(part)
        before = found.get(part, {}).get("served", ())
        found[part] = runs[part]() | {"ran_on": device()}
        if part == "serve":
            anew = {run["budget_gb"] or 0.0 for run in found[part]["served"]}
            kept = [run for run in before if (run["budget_gb"] or 0.0) not in anew]
            found[part]["served"] = kept + [
                run | {"ran_on": found[part]["ran_on"]} for run in found[part]["served"]
            ]
        out.write_text(json.dumps(found, indent=1))
        say(f"{part}: {'ok' if found[part]['ok'] else 'FAILED'}")
    return all(found[part]["ok"] for part in parts)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="[default: all]")
@click.option(
    "--budget-gb", "budgets", type=FiniteRange(0, 10_000), multiple=True, default=(2.0, 8.0, 0.0),
    show_default=True, help="KV memory in GB; 0 is all that is left.",
)  # fmt: skip
def main(out: Path, parts: tuple[str, ...], budgets: tuple[float, ...]) -> None:
    """Run what needs a CUDA device; exit status 0 only if every part passed."""
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device here; see docs/gpu.md")
    with stop_on_signals():
        passed = measure(out, parts or PARTS, budgets, lambda line: click.echo(line, err=True))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
