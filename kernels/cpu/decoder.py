"""A stack of decoder layers in one call of the compiled kernels: a step's work without Python in
between, on permanent buffers that all layers share (the precompiled execution of "eLLM: Achieving
Lossless Million-Token LLM Inference on CPUs Faster Than GPUs")."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref
from dataclasses import dataclass

import torch

from ellm_sgl.kernels.cpu.attention import Plan, instruction_set_for, prepared
from ellm_sgl.kernels.cpu.library import (
    TYPES,
    Call,
    Gate,
    Layer,
    Norm,
    Product,
    Rotation,
    Step,
    StepGroup,
    best_instruction_set,
    loaded,
)
from ellm_sgl.kernels.cpu.prefetch import Prefetch
from ellm_sgl.kernels.cpu.product import most_rows, weight_prefetch
from ellm_sgl.kernels.layout import GroupLayout


@dataclass(frozen=True)
class NormWeights:
    """RMS normalisation."""

    weight: torch.Tensor
    """[size]."""
    epsilon: float


@dataclass(frozen=True)
class ProductWeights:
    """`torch.nn.functional.linear`."""

    weight: torch.Tensor
    """[outputs, size], contiguous."""
    bias: torch.Tensor | None
    """[outputs]."""


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer as Llama, Mistral, Qwen2 and Qwen3 have it. All of one type of `TYPES`."""

    input_norm: NormWeights
    qkv: ProductWeights
    """To heads of Q, of K and of V."""
    query_norm: NormWeights | None
    """Of each head of Q,"""
    key_norm: NormWeights | None
    """and of K; both or none."""
    cosines: torch.Tensor
    """[positions, turned]: cosines, then sines. See `operators.rotate`."""
    scale: float
    """Of attention's scores."""
    out: ProductWeights
    output_norm: NormWeights
    mlp: tuple[ProductWeights, ProductWeights] | None
    """Gate and up in one, and down; None: experts, which others compute (`CompiledDecoder.normed`)
    once the layer has run."""


@dataclass(frozen=True)
class Heads:
    """Heads of attention: of Q, of K and V, and elements of each."""

    query: int
    kv: int
    size: int


class CompiledDecoder:
    """Layers of a decoder, ready to run.

    Args:
        layers: their weights, which are read where they are.
        heads: of each.
        keys, values: of each layer: the pool's, [units, block_tokens, KV heads, head size].
        groups: of each layer, its layer group, from 0 on.
        prefetch: how attention asks for KV.

    Raises:
        ValueError: a shape or a type is not what the kernels take; it says which.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        heads: Heads,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        groups: Sequence[int],
        prefetch: Prefetch,
    ) -> None:
        for layer in layers:
            _check(layer, heads)
        first = layers[0]
        self._dtype = first.qkv.weight.dtype
        products = [p for x in layers for p in (x.qkv, x.out, *(x.mlp or ()))]
        self.most_rows = min(most_rows(p.weight.shape[1], self._dtype) for p in products)
        """Of a step."""
        self._library = loaded()
        self._kept = layers, keys, values
        self._block_tokens, self._head_size = keys[0].shape[1], heads.size
        self._units = min(len(of) for of in keys)
        widths = {x.mlp[1].weight.shape[1] for x in layers if x.mlp is not None}
        if len({len(layer.cosines) for layer in layers}) > 1:
            raise ValueError("layers' cosines are for different numbers of positions")
        if len(widths) > 1:
            raise ValueError(f"MLPs of {' and '.join(map(str, sorted(widths)))} elements")
        self._buffers = _Buffers(first, heads, max(widths, default=0), self.most_rows)
        made = [
            _layer(layer, heads, self._buffers, (k, v), prefetch)
            for layer, k, v in zip(layers, keys, values, strict=True)
        ]
        for each, group, following in zip(made, groups, (*groups[1:], None), strict=True):
            each.group, each.ends_group = group, group != following
        self._layers = (Layer * len(made))(*made)

    def prepare(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        groups: Sequence[GroupLayout],
        delta: float,
    ) -> PreparedStep:
        """A step, for `run`.

        Args:
            embedded: [rows of the first group, hidden], contiguous: the first layer's input.
            positions: int64 [rows of the first group], contiguous.
            groups: all layer groups' layouts; none has more rows than the one before. Rows that a
                group has beyond the next one's, or the last beyond the new rows, are recomputed: in
                its last layer they are done when attention has their K and V.
            delta: see `attention.mixed_attention`.

        Raises:
            ValueError: there are more rows than `most_rows`, or the pool has fewer units than the
                layouts speak of.
        """
        rows = embedded.shape[0]
        if rows > self.most_rows or rows != groups[0].rows:
            raise ValueError(f"{rows} rows of {groups[0].rows}, at most {self.most_rows}")
        of_groups = [self._plan(group) for group in groups]
        after = [group.rows for group in groups[1:]]
        new = groups[-1].requests[-1].new.end_row
        of_step = (StepGroup * len(groups))(
            *(
                StepGroup(plan.handle, group.group, group.rows, left)
                for plan, group, left in zip(of_groups, groups, (*after, new), strict=True)
            )
        )
        step = Step(
            addressof(of_step), positions.data_ptr(), embedded.data_ptr(),
            torch.get_num_threads(), *weight_prefetch(self._dtype, rows), delta,
        )  # fmt: skip
        return PreparedStep(step, (embedded, positions, of_groups), of_step)

    def run(self, step: PreparedStep, first: int, last: int) -> bool:
        """Layers [first, last) of a step; those before have run. False, and nothing done: a
        position has no cosines."""
        return bool(self._library.ellm_decode(self._layers, first, last, byref(step.numbers)))

    def normed(self, step: PreparedStep, layer: int) -> torch.Tensor:
        """What the experts of a layer that has run are given, [rows, hidden]."""
        return self._buffers.normed[: self._rows_after(step, layer)]

    def put(self, step: PreparedStep, layer: int, outputs: torch.Tensor) -> None:
        """What they have made of it, likewise: the next layer's, or the output."""
        self._buffers.down[: self._rows_after(step, layer)] = outputs

    def _rows_after(self, step: PreparedStep, layer: int) -> int:
        of = self._layers[layer]
        group = step.groups[of.group]
        return int(group.rows_after if of.ends_group else group.rows)

    def _plan(self, group: GroupLayout) -> Plan:
        plan = prepared(group.stacked, self._block_tokens, self._head_size)
        if self._units <= plan.largest_unit:
            raise ValueError(f"unit {plan.largest_unit} of {self._units}")
        return plan

    def outputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last layer that has run: its output and the residual stream beside it, [rows,
        hidden] each, until the next step."""
        return self._buffers.down[:rows], self._buffers.after[:rows]


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step that can be run, group by group."""

    numbers: Step
    kept: tuple[object, ...]
    """What it points to,"""
    groups: Array[StepGroup]
    """with these, a step in the layers of each group."""


class _Buffers:
    """What goes from one operator to the next, [rows, elements] each."""

    def __init__(self, layer: LayerWeights, heads: Heads, inner: int, rows: int) -> None:
        def buffer(elements: int) -> torch.Tensor:
            return torch.zeros(rows, elements, dtype=layer.qkv.weight.dtype)

        hidden = layer.input_norm.weight.shape[0]
        self.normed = buffer(hidden)
        self.before = buffer(hidden)
        """The residual stream, after a layer's first addition,"""
        self.after = buffer(hidden)
        """and after its second."""
        self.qkv = buffer(layer.qkv.weight.shape[0])
        self.query = buffer(heads.query * heads.size)
        self.key = buffer(heads.kv * heads.size)
        self.attended = buffer(heads.query * heads.size)
        self.out = buffer(hidden)
        self.gate_up = buffer(2 * inner)
        self.gated = buffer(inner)
        self.down = buffer(hidden)


def _layer(
    layer: LayerWeights,
    heads: Heads,
    buffers: _Buffers,
    pool: tuple[torch.Tensor, torch.Tensor],
    prefetch: Prefetch,
) -> Layer:
    kind, isa = TYPES[layer.qkv.weight.dtype], best_instruction_set()
    element = layer.qkv.weight.element_size()
    qkv = buffers.qkv.data_ptr()
    width = layer.qkv.weight.shape[0]
    after_query = heads.query * heads.size
    queries, keys, strides = qkv, qkv + after_query * element, (width, width)
    value = qkv + (after_query + heads.kv * heads.size) * element

    def norm(of: NormWeights, x: int, residual: int | None, out: int, total: int | None) -> Norm:
        size = of.weight.shape[0]
        return Norm(
            x, residual, of.weight.data_ptr(), out, total, 0, size, of.epsilon, kind, 0, isa
        )

    def product(of: ProductWeights, x: torch.Tensor, out: torch.Tensor) -> Product:
        outputs, size = of.weight.shape
        bias = None if of.bias is None else of.bias.data_ptr()
        return Product(
            x.data_ptr(), of.weight.data_ptr(), bias, out.data_ptr(), x.stride(0), 0, size, outputs,
            kind, 0, isa, 0, 0,
        )  # fmt: skip

    query_norm, key_norm = Norm(), Norm()
    if layer.query_norm is not None and layer.key_norm is not None:
        query_norm = norm(layer.query_norm, queries, None, buffers.query.data_ptr(), None)
        key_norm = norm(layer.key_norm, keys, None, buffers.key.data_ptr(), None)
        queries, keys = buffers.query.data_ptr(), buffers.key.data_ptr()
        strides = buffers.query.stride(0), buffers.key.stride(0)
    known, turned = layer.cosines.shape
    of_keys, of_values = pool
    attention = Call(
        queries, keys, value, of_keys.data_ptr(), of_values.data_ptr(),
        buffers.attended.data_ptr(), *strides, width, of_keys.stride(0), of_keys.stride(1), 0,
        heads.query, heads.kv, heads.size, of_keys.shape[1], kind, TYPES[of_keys.dtype], 0,
        instruction_set_for(heads.size)[0], *prefetch.numbers, layer.scale, 0.0,
    )  # fmt: skip
    rotation = Rotation(
        queries, keys, layer.cosines.data_ptr(), None, *strides, 0, known, heads.query, heads.kv,
        heads.size, turned, kind, 0, isa,
    )  # fmt: skip
    gate_up, gate, down_product = Product(), Gate(), Product()
    if layer.mlp is not None:
        gated = buffers.gated
        gate_up = product(layer.mlp[0], buffers.normed, buffers.gate_up)
        gate = Gate(buffers.gate_up.data_ptr(), gated.data_ptr(), 0, gated.shape[1], kind, 0, isa)
        down_product = product(layer.mlp[1], gated, buffers.down)
    down, after = buffers.down.data_ptr(), buffers.after.data_ptr()
    normed, before, out = (of.data_ptr() for of in (buffers.normed, buffers.before, buffers.out))
    return Layer(
        input=norm(layer.input_norm, down, after, normed, before),
        qkv=product(layer.qkv, buffers.normed, buffers.qkv),
        query=query_norm,
        key=key_norm,
        rotation=rotation,
        attention=attention,
        out=product(layer.out, buffers.attended, buffers.out),
        output=norm(layer.output_norm, out, before, normed, after),
        gate_up=gate_up,
        gate=gate,
        down=down_product,
    )


def _check(layer: LayerWeights, heads: Heads) -> None:
    hidden = layer.input_norm.weight.shape[0]
    of_query, of_kv = heads.query * heads.size, heads.kv * heads.size
    norms = {"input norm": (layer.input_norm, hidden), "output norm": (layer.output_norm, hidden)}
    for name, of_heads in (("query norm", layer.query_norm), ("key norm", layer.key_norm)):
        if of_heads is not None:
            norms[name] = of_heads, heads.size
    for name, (norm, size) in norms.items():
        _check_tensor(name, norm.weight, (size,), layer)
    if (layer.query_norm is None) != (layer.key_norm is None):
        raise ValueError("a norm of queries or of keys, not of both")
    products = [
        ("qkv", layer.qkv, of_query + 2 * of_kv, hidden),
        ("out", layer.out, hidden, of_query),
    ]
    if layer.mlp is not None:
        gate_up, down = layer.mlp
        inner = down.weight.shape[-1]
        products += [("gate and up", gate_up, 2 * inner, hidden), ("down", down, hidden, inner)]
    for name, product, outputs, size in products:
        _check_tensor(name, product.weight, (outputs, size), layer)
        if product.bias is not None:
            _check_tensor(f"bias of {name}", product.bias, (outputs,), layer)
    turned = layer.cosines.shape[-1]
    _check_tensor("cosines", layer.cosines, (len(layer.cosines), turned), layer)
    if turned > heads.size or turned % 2:
        raise ValueError(f"{turned} elements of heads of {heads.size} are turned")


def _check_tensor(name: str, of: torch.Tensor, shape: tuple[int, ...], layer: LayerWeights) -> None:
    dtype = layer.qkv.weight.dtype
    if of.shape != shape or of.dtype is not dtype or dtype not in TYPES:
        raise ValueError(f"{name}: {tuple(of.shape)} {of.dtype}, not {shape} {dtype}")
    if type(of) is not torch.Tensor:
        raise ValueError(f"{name}: {type(of).__name__}, no plain tensor")
    if not (of.is_cpu and of.is_contiguous()):
        raise ValueError(f"{name}: not contiguous, or not in the host's memory")
