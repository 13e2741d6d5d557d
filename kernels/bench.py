"""Times the CPU attention kernels against their peers and against what the machine can do.

Everything that is compared runs in turn, round after round, the order reversed every other round:
on a machine that others use too, only ratios within a round mean something. Reported are medians.

Peers:
- `torch_native`: what SGLang's backend of that name does: per request, gather K and V token by
  token, then PyTorch's attention (a prompt begins at position 0, so it pads nothing);
- `torch_paged`: eLLM's kernel of PyTorch operations;
- `sdpa`: PyTorch's attention alone, on K and V that already lie side by side;
- `read`, `copy`, `multiply`: the machine, with as many threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.cpu import attention as cpu
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange

BLOCK_TOKENS = 16
LAYERS = 4
"""Layers of a unit: K and V of one layer lie that far apart, as in a real pool."""
LIMIT_BYTES = 1 << 28
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One attention call: `batch` requests of `context` tokens, the last `new` of them new."""

    name: str
    batch: int
    context: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    missing: float = 0.0
    """Share of the blocks before the new tokens that are computed again."""


def cases(largest_context: int) -> tuple[Case, ...]:
    """What is measured: demo-model, Llama-like and multi-head shapes."""
    shapes = ((6, 2, 32, "float32"), (8, 8, 128, "float32"), (32, 8, 128, "bfloat16"))
    found = [Case("decode", 32, 1024, 1, *shape) for shape in shapes]
    context = 32768
    while context <= largest_context:
        found += [Case("long decode", 1, context, 1, *shape) for shape in shapes[1:]]
        context *= 2
    found += [Case("prefill", 1, 2048, 2048, *shape) for shape in shapes]
    found += [Case("mixed", 16, 1024, 1, *shape, missing=0.4) for shape in shapes]
    return tuple(found)


@dataclass(frozen=True)
class Result:
    """One case. Times in ms, medians; ratios to the C++ kernel's time, medians of the rounds."""

    case: Case
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    """Each peer's time over that of the C++ kernel: how many times faster the kernel is."""
    read_share: float
    """KV bytes per second over the read bandwidth of the same round."""
    multiply_share: float
    """Multiply-adds per second over the fp32 matrix-product rate of the same round."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(case: Case, rounds: int) -> Result:
    """Run one case `rounds` times against its peers and the machine."""
    setting = _Setting(case)
    runs = setting.runs()
    times = interleave({**runs, "read": setting.read, "multiply": setting.multiply}, rounds)
    own = times["cpu"]
    return Result(
        case=case,
        milliseconds={name: 1e3 * statistics.median(t) for name, t in times.items()},
        ratio={name: _median_ratio(times[name], own) for name in runs if name != "cpu"},
        read_share=_median_ratio(times["read"], own) * setting.kv_bytes / LIMIT_BYTES,
        multiply_share=_median_ratio(times["multiply"], own) * setting.flops / setting.matrix_flops,
    )


def peers(case: Case) -> dict[str, Run]:
    """What is compared in a case, by name; each call computes the same attention."""
    return _Setting(case).runs()


def machine_limits(rounds: int) -> dict[str, float]:
    """GB/s of reading and of copying (bytes read, not read + written), GFLOP/s of products."""
    source = torch.ones(LIMIT_BYTES // 4)
    target = torch.empty_like(source)
    matrices = {name: torch.ones(1024, 1024, dtype=dtype) for name, dtype in TYPES.items()}
    runs: dict[str, Run] = {"read": source.sum, "copy": lambda: target.copy_(source)}
    runs["multiply float32"] = lambda: matrices["float32"] @ matrices["float32"]
    runs["multiply bfloat16"] = lambda: matrices["bfloat16"] @ matrices["bfloat16"]
    times = {n: statistics.median(t) for n, t in interleave(runs, rounds).items()}
    work = {"read": LIMIT_BYTES, "copy": LIMIT_BYTES}
    return {name: work.get(name, 2 * 1024**3) / t / 1e9 for name, t in times.items()}


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in every round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            runs[name]()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


class _Setting:
    """The tensors of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dtype = TYPES[case.dtype]
        blocks = -(-case.context // BLOCK_TOKENS)
        self.units = torch.randperm(case.batch * blocks).view(case.batch, blocks) + 1
        size = (self.units.numel() + 1, LAYERS, 2, BLOCK_TOKENS, case.kv_heads, case.head_dim)
        if case.name == "long decode":  # one layer is large enough
            size = (size[0], 1, *size[2:])
        # Uniform, not normal: the generator takes longer than everything that is measured.
        pool = torch.empty(size, dtype=dtype).uniform_(-1, 1)
        self.keys, self.values = pool[:, 0, 0], pool[:, 0, 1]
        self.layout = _layout(case, self.units)
        shape = (self.layout.rows, case.heads, case.head_dim)
        self.q = torch.randn(shape).to(dtype)
        self.k = torch.randn(shape[0], case.kv_heads, case.head_dim).to(dtype)
        self.v = self.k.clone()
        self.scale = case.head_dim**-0.5
        token_bytes = 2 * case.kv_heads * case.head_dim * dtype.itemsize
        self.kv_bytes = case.batch * case.context * token_bytes
        self.flops = 4 * case.heads * case.head_dim * self._pairs()
        self.stream = torch.ones(LIMIT_BYTES // 4)
        self.matrix = torch.ones(1024, 1024)
        self.matrix_flops = 2 * 1024**3

    def read(self) -> None:
        self.stream.sum()

    def multiply(self) -> None:
        _ = self.matrix @ self.matrix

    def runs(self) -> dict[str, Run]:
        case = self.case
        args = self.q, self.k, self.v, self.keys, self.values
        runs: dict[str, Run] = {
            "cpu": lambda: cpu.mixed_attention(*args, self.layout, self.scale),
            "torch_paged": lambda: torch_paged.mixed_attention(*args, self.layout, self.scale),
        }
        if case.missing:
            recompute, decode = self._separate_passes()
            runs["cpu, two passes"] = lambda: (recompute(), decode())
            return runs
        slots = self.units[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        slots = slots.flatten(1)[:, : case.context]
        # As SGLang's own pool has them: tokens one after the other, [slots, kv_heads, head_dim].
        flat_k, flat_v = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        runs["torch_native"] = lambda: self._native(flat_k, flat_v, slots)
        if case.new > 1:
            one_k, one_v = flat_k[slots[0]], flat_v[slots[0]]
            runs["sdpa"] = lambda: self._sdpa(self.q[: case.new], one_k, one_v)
        return runs

    def _native(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        new = self.case.new
        for i, own in enumerate(slots):
            self._sdpa(self.q[i * new : (i + 1) * new], keys[own], values[own])

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        gqa = self.case.heads != self.case.kv_heads
        causal = self.case.new > 1
        scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale, enable_gqa=gqa)

    def _pairs(self) -> int:
        """(query, key) pairs that attention multiplies."""
        ranges = [r for request in self.layout.requests for r in (request.new, *request.spans)]
        return sum(r.size * r.position + r.size * (r.size + 1) // 2 for r in ranges)

    def _separate_passes(self) -> tuple[Run, Run]:
        """Recompute the missing blocks into the pool, then decode with nothing missing."""
        case, new = self.case, self.case.batch
        complete = _layout(Case(**{**asdict(case), "missing": 0.0}), self.units)
        chunks = [
            RequestLayout(RowRange(span.row - new, span.position, span.size), (), r.blocks, False)
            for r in self.layout.requests
            for span in r.spans
        ]
        places = [
            (complete.units[r.blocks][span.position // BLOCK_TOKENS :], span)
            for r in self.layout.requests
            for span in r.spans
        ]
        units = torch.cat([own[: span.size // BLOCK_TOKENS] for own, span in places])
        rows = self.layout.rows - new
        recompute = GroupLayout.of(
            rows,
            tuple(chunks),
            complete.units,
            slice(0, rows),
            units.repeat_interleave(BLOCK_TOKENS),
            torch.arange(BLOCK_TOKENS).repeat(len(units)),
        )

        def run(layout: GroupLayout, rows: slice) -> None:
            q, k, v = self.q[rows], self.k[rows], self.v[rows]
            cpu.mixed_attention(q, k, v, self.keys, self.values, layout, self.scale)

        return (
            lambda: run(recompute, slice(new, None)),
            lambda: run(complete, slice(0, new)),
        )


def _layout(case: Case, units: torch.Tensor) -> GroupLayout:
    """Every block has its unit, but the first `missing` of each request are computed again."""
    blocks = units.shape[1]
    before = case.context - case.new
    missing = int(case.missing * before) // BLOCK_TOKENS * BLOCK_TOKENS
    requests = [
        RequestLayout(
            RowRange(i * case.new, before, case.new),
            (RowRange(case.batch * case.new + i * missing, 0, missing),) if missing else (),
            slice(i * blocks, (i + 1) * blocks),
            unstored_new=False,
        )
        for i in range(case.batch)
    ]
    positions = torch.arange(before, case.context)
    return GroupLayout.of(
        rows=case.batch * (case.new + missing),
        requests=tuple(requests),
        units=units.flatten(),
        write_rows=slice(0, case.batch * case.new),
        write_units=units[:, positions // BLOCK_TOKENS].flatten(),
        write_offsets=(positions % BLOCK_TOKENS).repeat(case.batch),
    )


def _median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
