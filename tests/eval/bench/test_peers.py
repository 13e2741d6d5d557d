"""`bench peers`: rates that follow from times, weights as llama.cpp has them, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.client.replay import Outcome, Request
from ellm_sgl.config import ConfigError
from ellm_sgl.eval import tiny_models
from ellm_sgl.eval.bench.peers import gguf_model, llama_cpp
from ellm_sgl.eval.bench.peers.llama_cpp import Generated, LlamaCpp
from ellm_sgl.eval.bench.peers.rates import Rates, Work
from ellm_sgl.eval.bench.result import MeasurementError
from ellm_sgl.eval.bench.scenarios.peers import Peers
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.serve.cli import main


def outcome(prompt: int, token_s: list[float], finish: str = "length") -> Outcome:
    request = Request(0.0, (1,) * prompt, len(token_s))
    return Outcome(request, 1.0, token_s, [5] * len(token_s), finish)


def test_rates_of_streams() -> None:
    """Decoding counts from where the last has begun to where the first has ended."""
    first = outcome(100, [2.0, 2.1, 3.0, 3.5, 4.0])
    second = outcome(300, [3.0, 3.25, 3.75, 4.5, 5.0])
    rates = Rates.of_outcomes([first, second])
    assert rates.prefill == 400 / 2.0
    assert rates.decode == 4 / 1.0


def test_streams_that_were_never_together_are_refused() -> None:
    with pytest.raises(MeasurementError, match="ask for more"):
        Rates.of_outcomes([outcome(1, [2.0, 2.5]), outcome(1, [3.0, 3.5])])
    with pytest.raises(MeasurementError, match="abort"):
        Rates.of_outcomes([outcome(1, [2.0], finish="abort")])


def test_rates_of_batches() -> None:
    found = Generated(prefill_s=2.0, decode_s=0.5, outputs=[[1, 2, 3], [4, 5, 6]])
    assert Rates.of_generated([(1,) * 10, (1,) * 10], found) == Rates(10.0, 8.0)


def test_a_step_reads_all_weights_once() -> None:
    from safetensors.torch import load_file

    shape = read_model(DEMO_MODEL / "config.json")
    stored = load_file(DEMO_MODEL / "model.safetensors").values()
    work = Work.of(shape, 0, 0, 0, 4)
    assert work.decode_bytes == 4 * sum(t.numel() for t in stored if t.dim() > 1)
    longer = Work.of(shape, 2, 100, 20, 4).decode_bytes - work.decode_bytes
    assert longer == 2 * 110 * shape.kv_bytes_per_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha"])
def test_a_file_has_the_same_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import gguf
    from safetensors.torch import load_file

    model = tiny_models.write(name, tmp_path / name)
    gguf_model.write(model, file := tmp_path / "model.gguf", dtype)
    read = {t.name: t for t in gguf.GGUFReader(file).tensors}
    stored = load_file(model / "model.safetensors")
    assert len(read) == len(stored)
    down = stored["model.layers.1.mlp.down_proj.weight"].to(dtype)
    data = torch.from_numpy(read["blk.1.ffn_down.weight"].data.copy())
    same = data.view(torch.bfloat16) if dtype is torch.bfloat16 else data
    assert torch.equal(same, down)
    assert read["blk.1.attn_norm.weight"].data.dtype == "float32"
    assert ("output.weight" in read) == (name == "llama-gqa")


def test_what_is_no_llama_is_refused(tmp_path: Path) -> None:
    model = tiny_models.write("qwen2", tmp_path / "qwen2")
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM.*leave llama.cpp out with --server"):
        gguf_model.write(model, tmp_path / "model.gguf", torch.float32)


def test_rotated_elements_lie_side_by_side() -> None:
    weight = torch.arange(8.0)[:, None]
    assert gguf_model.interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--load", "8x"], "--load 8x: give requests and tokens, as 8x128"),
        (["--load", "1x9000"], "this model's context is 8192"),
        (["--threads", "1000"], "--threads 1000:"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], problem: str) -> None:
    done = CliRunner().invoke(main, ["bench", "peers", *arguments])
    assert done.exit_code != 0 and problem in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error:")]) == 1


@pytest.mark.skipif(not llama_cpp.lacking(), reason="llama-cpp-python is installed")
def test_what_is_not_installed_is_left_out_unless_it_is_asked_for() -> None:
    assert list(Peers().starters()) == ["eLLM", "torch_native"]
    with pytest.raises(ConfigError, match="install llama-cpp-python first"):
        Peers(only=("llama.cpp",)).check()


@pytest.mark.skipif(bool(llama_cpp.lacking()), reason="llama-cpp-python is not installed")
def test_llama_cpp_generates_what_transformers_does(tmp_path: Path) -> None:
    import transformers

    gguf_model.write(DEMO_MODEL, file := tmp_path / "model.gguf", torch.float32)
    prompts = [tuple(b"def main():\n    "), tuple(b"import ")]
    with LlamaCpp(file, 1, "float32") as engine:
        engine.generate([tuple(b"x" * 300)] * 3, 2)  # with another load's context
        found = engine.generate(prompts, 12).outputs
        assert engine.generate(prompts, 12).outputs == found
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    for prompt, output in zip(prompts, found, strict=True):
        right = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert output == right[0, len(prompt) :].tolist()
