"""A Llama of transformers' format as a GGUF file, for llama.cpp: the same weights, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ellm_sgl.config import ConfigError

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "LlamaForCausalLM"
WITHOUT_LAYER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


ROTATED = {
    "self_attn.q_proj.weight": "num_attention_heads",
    "self_attn.k_proj.weight": "num_key_value_heads",
}
"""Projections whose outputs are, and what says how many heads these have."""


def write(model: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the model of that folder to `target`, matrices in `dtype` (fp32 or bf16).

    Raises:
        ConfigError: it is not a plain Llama.
    """
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config["architectures"] != [ARCHITECTURE] or config.get("rope_scaling"):
        raise ConfigError(
            f"{model}: {config['architectures']}; llama.cpp is compared on a {ARCHITECTURE} "
            "without rope scaling: give one, or leave llama.cpp out with --server"
        )
    writer = gguf.GGUFWriter(target, "llama")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(model, {**config, "num_key_value_heads": kv_heads}):
        _add(writer, name, tensor, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each with llama.cpp's name for it."""
    from safetensors import safe_open

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                tensor = file.get_tensor(name)
                if (known := WITHOUT_LAYER.get(name)) is not None:
                    yield known, tensor
                    continue
                _, _, layer, rest = name.split(".", 3)
                if (heads := ROTATED.get(rest)) is not None:
                    tensor = interleaved(tensor, config[heads])
                yield f"blk.{layer}.{OF_LAYER[rest]}", tensor


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Of a projection whose outputs are rotated: transformers rotates element i of a head with
    element i + d/2, llama.cpp 2i with 2i + 1.

    Args:
        weight: [heads · d, size].
    """
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Vectors are fp32 there, whatever matrices are."""
    import gguf
    import torch

    if tensor.dim() == 1 or dtype is torch.float32:
        writer.add_tensor(name, tensor.float().numpy())
        return
    half = tensor.to(dtype).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, half, raw_dtype=gguf.GGMLQuantizationType.BF16)
