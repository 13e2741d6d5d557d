"""Steps go through all of a model's layers in one call (`kernels.cpu.decoder`).

A step of a small model, or of few requests, is as much Python as arithmetic: a layer is a dozen
modules. Where a model's layers are those that the compiled decoder knows, it stands in for the
decoder's `forward`, with the same results to the bit, in steps that have no more rows than its
products take, recomputed ones included. All else goes SGLang's own way: larger steps, and other
models, of which one line at the start says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ellm_sgl.config import ConfigError
from ellm_sgl.config.ranges import shown
from ellm_sgl.kernels.cpu.decoder import (
    CompiledDecoder,
    Heads,
    LayerWeights,
    NormWeights,
    PreparedStep,
    ProductWeights,
)
from ellm_sgl.memory import KVPool
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.mixes import Mix
from ellm_sgl.sglang.own_forwards import others_forward
from ellm_sgl.sglang.platform.operators import is_plain
from ellm_sgl.sglang.synthetic_steps import SyntheticSteps
from ellm_sgl.step import Executor, StepPlan

if TYPE_CHECKING:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.model_executor.model_runner import ModelRunner

    from ellm_sgl.kernels.cpu.prefetch import Prefetch
    from ellm_sgl.sglang.attention import EllmAttention

logger = logging.getLogger(__name__)

VARIABLE = "ELLM_SGL_COMPILED_LAYERS"
"""Environment: `off` leaves all steps to SGLang's layers. For tests and comparisons."""
PARTS = {
    "": {"self_attn", "mlp", "block_sparse_moe", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"qkv_proj", "o_proj", "rotary_emb", "attn", "q_norm", "k_norm"},
    "mlp": {"gate_up_proj", "down_proj", "act_fn"},
    "experts": {"gate", "experts", "topk"},
}
"""The modules of a layer, and of its parts, that are known: one that has others is not compiled."""


class NotCompiledError(Exception):
    """Steps go through SGLang's layers; the message says why."""


class Parameters:
    """Those of a module and of all in it, which may be given other memory, or be replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (each._parameters, name)
            for each in module.modules()
            for name, parameter in each._parameters.items()
            if parameter is not None
        ]
        self._addresses = self._found()

    def moved(self) -> bool:
        """Whether one lies elsewhere than at first."""
        return self._found() != self._addresses

    def _found(self) -> list[int] | None:
        """None: one is gone."""
        found: Iterator[Any] = starmap(dict.get, self._places)
        try:  # in each step, so without a line of Python for each
            return list(map(torch.Tensor.data_ptr, found))
        except TypeError:
            return None


class CompiledLayers:
    """In place of a decoder's `forward`.

    Args:
        decoder: SGLang's: `embed_tokens`, `layers`, `norm`.
        executor: has the plan of the step being computed.
        pool: KV of the layers.
        prefetch: how attention asks for KV.

    Raises:
        NotCompiledError: see the class.
    """

    def __init__(self, decoder: Any, executor: Executor, pool: KVPool, prefetch: Prefetch) -> None:
        if executor.hidden is not None:
            raise NotCompiledError("hidden states of the layers are kept")
        if executor.separate is not None:
            raise NotCompiledError("recomputed rows have a pass of their own")
        modules = decoder.layers.modules()  # later steps that recompute look at them themselves
        if any(each._forward_hooks or each._forward_pre_hooks for each in modules):
            raise NotCompiledError("somebody looks at what its modules do")
        self._decoder, self._executor, self._pool = decoder, executor, pool
        self._prefetch = prefetch
        self._original: Callable[..., Any] = decoder.forward
        layers, size = pool.shape.num_layers, pool.shape.layer_group
        self._groups = [(first, min(first + size, layers)) for first in range(0, layers, size)]
        """First layer of each group, and the one after its last."""
        self._compile()
        self.steps = 0
        """That have run so."""

    def _compile(self) -> None:
        layers, shape = self._decoder.layers, self._pool.shape
        self._parameters = Parameters(layers)
        try:
            heads = {_heads(layer) for layer in layers}
            if len(heads) > 1:
                raise NotCompiledError("layers have different heads")
            self._experts = [(at, _mlp(x)) for at, x in enumerate(layers) if _has_experts(x)]
            """By layer: SGLang's, between compiled layers."""
            self._compiled = CompiledDecoder(
                [_weights(layer) for layer in layers],
                heads.pop(),
                [self._pool.keys(layer) for layer in range(shape.num_layers)],
                [self._pool.values(layer) for layer in range(shape.num_layers)],
                [shape.group_of(layer) for layer in range(shape.num_layers)],
                self._prefetch,
            )
        except (ValueError, AttributeError) as error:
            raise NotCompiledError(str(error)) from None

    @property
    def most_rows(self) -> int:
        """Of a step that runs so."""
        return self._compiled.most_rows

    def attach(self) -> None:
        """Stand in for the decoder's `forward` from now on."""
        self._decoder.forward = self.forward

    def detach(self) -> None:
        del self._decoder.forward

    @contextmanager
    def aside(self) -> Iterator[None]:
        """All steps inside this context go through SGLang's layers."""
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        *more: Any,
        **others: Any,
    ) -> Any:
        """As SGLang's decoder."""
        plan = self._executor.plan
        if (
            plan is not None
            and input_embeds is None
            and all(other is None for other in (*more, *others.values()))
            and self._takes(plan, input_ids, positions)
            and (hidden := self._run(plan, input_ids, positions)) is not None
        ):
            return hidden
        return self._original(input_ids, positions, forward_batch, input_embeds, *more, **others)

    def _takes(self, plan: StepPlan, input_ids: torch.Tensor, positions: torch.Tensor) -> bool:
        rows = input_ids.shape[0]
        return (
            0 < rows <= self._compiled.most_rows
            and rows == plan.rows_in(0)
            and not getattr(self._decoder, "layers_to_capture", None)
            and positions.shape == (rows,)
            and positions.dtype is torch.int64
            and positions.is_contiguous()
            and not torch.is_grad_enabled()
        )

    def _run(
        self, plan: StepPlan, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor | None:
        if self._parameters.moved():
            try:
                self._compile()
            except NotCompiledError as reason:
                self.detach()
                logger.warning("eLLM layers: from now on SGLang's own (%s)", reason)
                return None
        embedded = self._decoder.embed_tokens(input_ids).contiguous()
        compiled, streamer = self._compiled, self._executor.streamer
        step = compiled.prepare(embedded, positions, plan.groups, plan.delta)
        if streamer is None or not plan.transfers:
            if not self._through(step, 0, self._pool.shape.num_layers):
                return None
        else:
            for group, (first, last) in enumerate(self._groups):
                streamer.wait(group)
                if not self._through(step, first, last):
                    return None  # before anything has run: positions are the same for all
                streamer.done(group)
        self.steps += 1
        hidden: torch.Tensor = self._decoder.norm(*compiled.outputs(plan.new_rows))[0]
        return hidden

    def _through(self, step: PreparedStep, first: int, last: int) -> bool:
        """Layers [first, last), as `CompiledDecoder.run`."""
        for at, experts in self._experts:
            if first <= at < last:
                if not self._compiled.run(step, first, at + 1):
                    return False
                self._compiled.put(step, at, experts(self._compiled.normed(step, at)))
                first = at + 1
        return first == last or self._compiled.run(step, first, last)


def compile_layers(runner: ModelRunner, ours: Context) -> CompiledLayers | None:
    """The compiled layers of a model, attached; None, and one line that says why: SGLang's own.
    Nothing may be running."""
    from sglang.srt.runtime_context import get_parallel

    try:
        if not _wanted():
            raise NotCompiledError(f"{VARIABLE}=off")
        backend: EllmAttention = runner.attn_backend
        if (prefetch := getattr(backend, "prefetch", None)) is None:
            raise NotCompiledError("attention is not by the C++ kernels")
        if get_parallel().tp_size > 1:
            raise NotCompiledError("several ranks")
        decoder = runner.model.model
        found = CompiledLayers(decoder, ours.executor, ours.pool, prefetch)
        if (whose := others_forward(decoder)) is not None:
            raise NotCompiledError(whose)
        _check(found, SyntheticSteps(runner, ours), ours.pool.shape.block_tokens)
    except NotCompiledError as reason:
        logger.info("eLLM layers: SGLang's own (%s)", reason)
        return None
    logger.info("eLLM layers: compiled, for steps of up to %d rows", found.most_rows)
    return found


def _wanted() -> bool:
    """ConfigError where the variable says neither."""
    text = os.environ.get(VARIABLE, "on")
    if text not in ("on", "off"):
        raise ConfigError(f"{VARIABLE}={shown(text)}: give on or off, or leave it out")
    return text == "on"


def _check(found: CompiledLayers, steps: SyntheticSteps, block: int) -> None:
    """Attaches it, if steps have the same logits and write the same KV in every layer, to the bit,
    as SGLang's layers: what a layer writes depends on all that those below it computed.

    Args:
        block: tokens of one.
    """
    # Few blocks: of a large model each is megabytes of KV. Rows beyond those for which weights are
    # read once are more of the same.
    most = min(found.most_rows, 72)
    mixes = (
        *(Mix(1, 17), Mix(5, 20), Mix(1, 40, new=7), Mix(1, 20 + most, new=most)),
        Mix(1, block + 4, uncached=block),
        Mix(2, 2 * block + 8, uncached=block),
        Mix(1, 2 * block + 8, new=7, uncached=block),
    )
    taken = [mix for mix in mixes if mix.rows <= found.most_rows]
    for seed, mix in enumerate(steps.that_fit(taken)):
        expected = steps.outcome(mix, seed)
        ran = found.steps
        found.attach()
        same = all(map(torch.equal, steps.outcome(mix, seed), expected))
        found.detach()
        if found.steps == ran:
            raise NotCompiledError(f"steps are other than it takes: {mix}")
        if not same:
            raise NotCompiledError(f"its results are not those of SGLang's layers: {mix}")
    found.attach()


def _known(module: nn.Module, part: str) -> None:
    unknown = {name for name, _ in module.named_children()} - PARTS[part]
    if unknown:
        raise NotCompiledError(f"{type(module).__name__} has {', '.join(sorted(unknown))}")


def _heads(layer: Any) -> Heads:
    attention = layer.self_attn
    return Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)


def _weights(layer: Any) -> LayerWeights:
    """Of one of SGLang's decoder layers."""
    from sglang.srt.layers.activation import SiluAndMul

    _known(layer, "")
    attention, mlp = layer.self_attn, _mlp(layer)
    _known(attention, "self_attn")
    _known(mlp, "experts" if _has_experts(layer) else "mlp")
    if not _has_experts(layer) and type(mlp.act_fn) is not SiluAndMul:
        raise NotCompiledError(f"activation {type(mlp.act_fn).__name__}")
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return LayerWeights(
        input_norm=_norm(layer.input_layernorm),
        qkv=_product(attention.qkv_proj),
        query_norm=None if query_norm is None else _norm(query_norm),
        key_norm=None if key_norm is None else _norm(key_norm),
        cosines=_cosines(attention.rotary_emb),
        scale=float(attention.attn.scaling),
        out=_product(attention.o_proj),
        output_norm=_norm(layer.post_attention_layernorm),
        mlp=None if _has_experts(layer) else (_product(mlp.gate_up_proj), _product(mlp.down_proj)),
    )


def _mlp(layer: Any) -> Any:
    """Whatever follows attention, by either name."""
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def _has_experts(layer: Any) -> bool:
    return hasattr(_mlp(layer), "experts")


def _norm(norm: Any) -> NormWeights:
    from sglang.srt.layers.layernorm import RMSNorm

    if type(norm) is not RMSNorm or not is_plain(norm):
        raise NotCompiledError(f"norm {type(norm).__name__}")
    return NormWeights(norm.weight.data, norm.variance_epsilon)


def _product(projection: Any) -> ProductWeights:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if (
        type(getattr(projection, "quant_method", None)) is not UnquantizedLinearMethod
        or hasattr(projection, "set_lora")
        or projection.skip_bias_add
    ):
        raise NotCompiledError(f"{type(projection).__name__} is quantised, or adapted")
    bias = projection.bias
    return ProductWeights(projection.weight.data, None if bias is None else bias.data)


def _cosines(rotary: RotaryEmbedding) -> torch.Tensor:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    plain = type(rotary).forward_native is RotaryEmbedding.forward_native and rotary.is_neox_style
    if not plain:
        raise NotCompiledError(f"rotary embedding {type(rotary).__name__}")
    cosines: torch.Tensor = rotary.cos_sin_cache
    return cosines
