"""Tiny models with random weights, one for each architecture and attention shape eLLM supports.

`python -m ellm_sgl.eval.tiny_models DIRECTORY [NAME]...` writes them; `ellm-sgl verify` and the
tests run them. A model of a few hundred kilobytes goes through the same code as a large one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

VOCABULARY = 512
CONTEXT, LONG = 4096, 8192


@dataclass(frozen=True)
class TinyModel:
    """Shape of one model."""

    config: str
    """Class name in transformers; the model class follows from it."""
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    tied: bool
    extra: Mapping[str, Any] = field(default_factory=dict)
    hidden: int = 128
    intermediate: int = 256
    vocabulary: int = VOCABULARY
    context: int = CONTEXT
    dtype: str = "float32"
    """In which weights are stored."""


TINY_MODELS = {
    "llama-gqa": TinyModel("LlamaConfig", 4, 2, 64, 5, tied=False),
    "llama-mha": TinyModel("LlamaConfig", 4, 4, 32, 3, tied=True),
    "qwen2": TinyModel("Qwen2Config", 2, 1, 64, 4, tied=True),
    "qwen3": TinyModel("Qwen3Config", 4, 2, 128, 6, tied=False),
    "mistral": TinyModel(
        "MistralConfig", 6, 2, 48, 4, tied=False, extra={"sliding_window": None}
    ),
    "mixtral": TinyModel(
        "MixtralConfig", 4, 2, 32, 3, tied=False,
        extra={"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": TinyModel(
        "Qwen3MoeConfig", 4, 2, 64, 4, tied=False,
        extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
               "norm_topk_prob": True},
    ),
}  # fmt: skip
MEASURED_MODELS = {
    "llama-24m": TinyModel(
        "LlamaConfig", 8, 4, 64, 8, tied=True, hidden=512, intermediate=1408, context=LONG
    ),
    "llama-21m-mha": TinyModel(
        "LlamaConfig", 6, 6, 64, 12, tied=True, hidden=384, intermediate=1024, context=LONG
    ),
    "llama-94m": TinyModel(
        "LlamaConfig", 12, 4, 64, 12, tied=True, hidden=768, intermediate=2560, context=LONG
    ),
    "llama-1b": TinyModel(
        "LlamaConfig", 32, 8, 64, 16, tied=True, hidden=2048, intermediate=8192, context=LONG,
        vocabulary=32_000, dtype="bfloat16",
    ),
}  # fmt: skip
"""Models whose weights do not fit a CPU's caches, for measurements: no test runs them."""


def write(name: str, directory: Path, seed: int = 0) -> Path:
    """Write the model `name` of `TINY_MODELS` or `MEASURED_MODELS` to `directory`; return that.

    Raises:
        KeyError: no such model.
    """
    from ellm_sgl.sglang.platform.torchvision_ops import declare

    declare()
    import torch
    import transformers

    tiny = {**TINY_MODELS, **MEASURED_MODELS}[name]
    config = getattr(transformers, tiny.config)(
        vocab_size=tiny.vocabulary,
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=tiny.context,
        tie_word_embeddings=tiny.tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **tiny.extra,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, tiny.config.replace("Config", "ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that attention decides the next token and few logits nearly tie.
                torch.nn.init.normal_(parameter, std=0.15)
    model.to(getattr(torch, tiny.dtype)).save_pretrained(directory)
    return directory


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument(
    "names", nargs=-1, metavar="[NAME]...", type=click.Choice([*TINY_MODELS, *MEASURED_MODELS])
)
def main(directory: Path, names: tuple[str, ...]) -> None:
    """Write the models called NAME, or all tiny ones, each to its own folder of DIRECTORY."""
    for name in names or TINY_MODELS:
        click.echo(write(name, directory / name))


if __name__ == "__main__":
    main()
