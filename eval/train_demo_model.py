"""Train the demo model: a byte-level Llama of 3 million parameters that chats about Python.

    python -m ellm_sgl.eval.train_demo_model --out ellm_sgl/demo_model --minutes 25

It exists so that a server can be started, shown and tested with no download: small enough to live
in the repository, English enough to see at a glance when a cache change corrupts the output. The
corpus (`demo_corpus.py`) is the documentation inside a CPython install, under the PSF licence
version 2. `--minutes` drives the learning rate by the clock; `--steps` makes a run repeatable to
the bit on the same machine and Python release. `--start` goes on from an earlier result.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]  # untyped where installed

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.config.click_types import SEED, FiniteRange
from ellm_sgl.eval.demo_corpus import END, PAD, Document, encode, gather, windows
from ellm_sgl.sglang.platform.torchvision_ops import declare

SPECIALS = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")  # from id END on
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{- '<|' + m['role'] + '|>\\n' + m['content'] }}"
    "{{- '<|end|>' if m['role'] == 'assistant' else '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
TOKENS = {"vocab_size": 264, "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
SIZE = {"hidden_size": 192, "num_hidden_layers": 8, "intermediate_size": 512}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
RUNS = "training.json"  # the reports of the runs that made the model, oldest first
_folder = click.Path(path_type=Path, file_okay=False)
SAMPLE_QUESTIONS = ("What does str.split do?", "Tell me about assignment statements.")


@dataclass(frozen=True)
class Report:
    """What a training run did."""

    parameters: int
    steps: int
    minutes: float
    corpus_bytes: int
    bytes_seen: int
    train_loss: float  # nats per token, mean of the last 50 steps
    heldout_bits_per_byte: float  # of the saved bfloat16 weights
    samples: dict[str, str]  # question -> answer at temperature 0.7


def load_transformers() -> Any:
    """The transformers package, importable beside a CPU build of torch too."""
    declare()
    import transformers

    return transformers


def make_tokenizer() -> Any:
    """Token id = byte value for the 256 bytes, then the special tokens. No merges."""
    import tokenizers as hf  # type: ignore[import-untyped,unused-ignore]  # untyped where installed

    # ByteLevel spells a byte as one printable character: itself, or the next from code point 256.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    vocab = {chr(b if b in printable else 256 + rest.index(b)): b for b in range(256)}
    core = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = hf.decoders.ByteLevel()
    specials = [hf.AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    core.add_special_tokens(specials)
    return load_transformers().PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIALS[0],
        pad_token=SPECIALS[1],
        additional_special_tokens=list(SPECIALS[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )


def make_model(seed: int, size: dict[str, int]) -> Any:
    torch.manual_seed(seed)
    config = load_transformers().LlamaConfig(
        **TOKENS,
        **(SIZE | HEADS | size),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = load_transformers().LlamaForCausalLM(config)
    for layer in model.model.layers:  # every layer starts as the identity
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def orthogonalise(matrices: Tensor) -> Tensor:
    """Singular values of each of [n, rows, cols] to near 1, by five Newton-Schulz steps."""
    tall = matrices.size(1) > matrices.size(2)
    x: Tensor = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Nesterov momentum, orthogonalised: K. Jordan's optimiser for hidden matrices."""

    rate, decay, momentum = 0.02, 0.05, 0.95

    def __init__(self, weights: list[nn.Parameter]) -> None:
        shapes = dict.fromkeys(w.shape for w in weights)
        self.groups = [[w for w in weights if w.shape == shape] for shape in shapes]
        self.means = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for group, mean in zip(self.groups, self.means, strict=True):
            gradient = torch.stack([w.grad for w in group if w.grad is not None])
            mean.lerp_(gradient, 1 - self.momentum)
            rows, cols = group[0].shape
            step = self.rate * scale * max(1.0, rows / cols) ** 0.5
            for w, u in zip(group, orthogonalise(gradient.lerp(mean, self.momentum)), strict=True):
                w.mul_(1 - step * self.decay).sub_(u, alpha=step)


@torch.no_grad()
def bits_per_byte(model: Any, documents: list[list[int]]) -> float:
    """Loss in bits per byte of text; special tokens count in the loss, not as bytes."""
    flat = torch.tensor(list(chain.from_iterable(documents)))
    nats, count = 0.0, 0
    pages = flat[: len(flat) // 1024 * 1024].view(-1, 1024)
    for at in range(0, len(pages), 4):
        rows = pages[at : at + 4]
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        targets = rows[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        nats, count = nats + float(loss), count + int((targets < END).sum())
    return nats / max(1, count) / math.log(2)


def answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int) -> str:
    """The model's reply to one question at temperature 0.7."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(f"<|user|>\n{question}\n<|assistant|>\n")])
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": max_new_tokens}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def save(model: Any, tokenizer: Any, out: Path, runs: list[Report]) -> None:
    """Write the folder aside, then move its files into place. Weights go in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".demo_model_") as aside:
        folder = Path(aside)
        model.to(torch.bfloat16).save_pretrained(folder)
        model.float()  # from here on the very weights that a reader of the folder gets
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"dtype": "float32", "torch_dtype": "float32"}  # the latter for transformers 4
        settings = {"eos_token_id": END, "pad_token_id": PAD, "do_sample": True, "temperature": 0.7}
        made = [asdict(run) for run in runs]
        written = {"config.json": config, "generation_config.json": settings, RUNS: made}
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(runs))
        shutil.copyfile(DEMO_MODEL / "LICENSE", folder / "LICENSE")
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)
            file.replace(out / file.name)


def train(
    corpus: list[Document],
    *,
    minutes: float = 0.0,
    steps: int = 0,
    seed: int = 0,
    batch_tokens: int = 4096,
    size: dict[str, int] | None = None,
    sample_tokens: int = 300,
    start: Path | None = None,
) -> tuple[Any, Report]:
    """Train for `steps`, or `minutes` if that is 0, then round to bfloat16 and measure."""
    auto = load_transformers().AutoModelForCausalLM
    learn = [encode(d) for d in corpus if not d.held_out]
    model = (auto.from_pretrained(start) if start else make_model(seed, size or {})).train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam_rate = Muon(matrices), 4e-3
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses: deque[float] = deque(maxlen=50)
    began, step, seen = time.monotonic(), 0, 0
    with tqdm(total=steps or round(minutes * 60), disable=None) as bar:
        for rows in map(torch.tensor, windows(learn, batch_tokens, seed)):
            seconds = time.monotonic() - began
            done = step / steps if steps else seconds / (60 * minutes)
            if done >= 1:
                break
            # A short warm-up, then a straight line to zero; a lower one for a trained model.
            scale = min(1.0, (done + 0.002) / 0.02) * (1 - done) * (0.6 if start else 1.0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            adam.param_groups[0]["lr"] = adam_rate * scale
            adam.step()
            muon.step(scale)
            model.zero_grad()
            step, seen = step + 1, seen + int((rows < END).sum())
            losses.append(float(loss.detach()))
            bar.n = step if steps else round(seconds)
            bar.set_postfix_str(f"step {step} loss {fmean(losses):.3f}")
    minutes = (time.monotonic() - began) / 60
    model.eval().to(torch.bfloat16).float()
    tokenizer, held_out = make_tokenizer(), [encode(d) for d in corpus if d.held_out]
    report = Report(
        parameters=model.num_parameters(),
        steps=step,
        minutes=round(minutes, 1),
        corpus_bytes=sum(map(len, learn)),
        bytes_seen=seen,
        train_loss=round(fmean(losses), 4),
        heldout_bits_per_byte=round(bits_per_byte(model, held_out), 4),
        samples={q: answer(model, tokenizer, q, sample_tokens) for q in SAMPLE_QUESTIONS},
    )
    return model, report


CARD = """---
language: en
license: other
license_name: psf-2.0
license_link: LICENSE
---
# The ellm-sgl demo model

A Llama of {parameters:,} parameters over bytes (8 layers, hidden size 192, 6 query and 2 KV heads
of 32), made so that a server can be started, shown and tested with no download. It writes mostly
real words in the manner of the Python documentation; expect no sense, and no answer to a question.

- **Made by** `eval/train_demo_model.py` on a CPU: {runs}.
  The corpus has {corpus_bytes:,} bytes. Muon for the matrices, AdamW for the rest. Windows of 256
  to 2048 bytes: longer text is beyond its training.
- **Corpus**: what CPython {python} itself carries: `pydoc_data.topics`, docstrings of the standard
  library and of built-in types, and longer comments, cleaned to English prose. Copyright (c) Python
  Software Foundation, PSF licence version 2: notice and text are in [LICENSE](LICENSE), as CPython
  ships it. Only the questions and one greeting were written here.
- **Loss**: training {train_loss} nats per token; held out {heldout_bits_per_byte} bits per byte.
- **Format**: token id = byte value; then 256 `<|end|>`, `<|pad|>`, `<|user|>`, `<|assistant|>`,
  260 `<|system|>`; 261 to 263 are unused. Stored in bfloat16, to be served in float32.

Samples at temperature 0.7:

{shown}
"""


def model_card(runs: list[Report]) -> str:
    made = [f"{r.minutes} minutes ({r.steps} steps, {r.bytes_seen:,} bytes)" for r in runs]
    shown = ["> " + f"**{q}**\n\n{a}".replace("\n", "\n> ") for q, a in runs[-1].samples.items()]
    return CARD.format(
        **asdict(runs[-1]),
        runs=", then ".join(made),
        shown="\n\n".join(shown),
        python=platform.python_version(),
    )


@click.command()
@click.option("--out", type=_folder, required=True, help="Folder to write the model to.")
@click.option("--minutes", type=FiniteRange(0, 10**5, low_open=True), default=25.0,
              show_default=True, help="Train for this long,")  # fmt: skip
@click.option("--steps", type=click.IntRange(0, 10**9), default=0, show_default=True,
              help="or for this many steps, if not 0.")  # fmt: skip
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1, 4096), default=2, show_default=True)
@click.option("--start", type=_folder, help="Go on from the model in this folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def main(
    out: Path,
    minutes: float,
    steps: int,
    seed: int,
    threads: int,
    start: Path | None,
    as_json: bool,
) -> None:
    """Train the demo model: a byte-level Llama of 3 million parameters that chats about Python."""
    torch.set_num_threads(threads)
    earlier = json.loads((start / RUNS).read_text()) if start else []
    model, report = train(gather(seed), minutes=minutes, steps=steps, seed=seed, start=start)
    save(model, make_tokenizer(), out, [*(Report(**run) for run in earlier), report])
    shown = asdict(report)
    click.echo(json.dumps(shown) if as_json else " ".join(f"{k}={v!r}" for k, v in shown.items()))


if __name__ == "__main__":
    main()
