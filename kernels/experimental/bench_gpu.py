"""Times one layer's attention of a mixed step on a CUDA device, against FlashInfer and the device.

The step: `batch` requests of `context` tokens decode one token each, and the first r of their
tokens are computed again. Everything compared runs in turn, round after round, the order reversed
every other round; a run is timed by events around several calls. Reported are medians.

- `fused`: eLLM's kernel, one launch, at each δ; it writes the KV too;
- `fused, apart`: the same kernel, recompute rows and decode rows in two launches;
- `flashinfer in parts`: eLLM's use of FlashInfer, exact with blocks missing;
- `flashinfer, apart` and `flashinfer POD`: FlashInfer's prefill followed by its decode, and its
  fused wrapper, both with the recomputed KV already in the pool: less work than eLLM has to do.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ellm_sgl.kernels.experimental.flashinfer import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    Pages,
    divide,
)
from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange

BLOCK_TOKENS = 16
LAYERS = 4
"""Layers of a unit: K and V of one layer lie that far apart, as in a real pool."""
CALLS = 5
"""Calls of a timed run, so that the host is ahead of the device."""
DELTAS = (32, 128, 256, 512, 768, 896, 992)
COPY_BYTES = 1 << 30
MATRIX = 8192

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One step. `missing`: share r of each request's tokens that is computed again."""

    batch: int
    context: int
    missing: float
    heads: int
    kv_heads: int
    head_dim: int = 128


def cases() -> tuple[Case, ...]:
    """Llama-2-13B's heads and Llama-3-8B's, over batch, context and r."""
    return tuple(
        Case(batch, context, missing, heads, kv_heads)
        for heads, kv_heads in ((40, 40), (32, 8))
        for batch, context in ((8, 1024), (32, 1024), (8, 8192), (2, 32768))
        for missing in (0.0, 0.1, 0.4)
    )


@dataclass(frozen=True)
class Result:
    """One case. Times in ms, medians; ratios of the same round, medians."""

    case: Case
    milliseconds: dict[str, float]
    ratio: dict[str, float]
    """Each peer's time over that of the fused kernel at its best δ."""
    best_delta: int
    read_share: float
    """KV bytes per second of the fused kernel over the device's copy bandwidth (read + write)."""
    multiply_share: float
    """Its multiply-adds per second over the bf16 matrix-product rate."""
    largest_difference: float
    """Between the peers' outputs of the decoded tokens and the fused kernel's."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def limits() -> dict[str, float]:
    """GB/s of copying (bytes read and written) and TFLOP/s of bf16 matrix products."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda")
    times = interleave({"copy": lambda: target.copy_(source), "multiply": lambda: a @ a}, 9)
    copy, multiply = (statistics.median(times[name]) for name in ("copy", "multiply"))
    return {"copy GB/s": 2 * COPY_BYTES / copy / 1e9, "TFLOP/s": 2 * MATRIX**3 / multiply / 1e12}


def measure(case: Case, rounds: int, device_limits: dict[str, float]) -> Result:
    """Run one case `rounds` times against its peers."""
    setting = Setting(case, torch.device("cuda"))
    runs = peers(setting)
    times = interleave(runs, rounds)
    median = {name: statistics.median(t) for name, t in times.items()}
    best = min(DELTAS, key=lambda delta: median[f"fused {delta}"])
    own = times[f"fused {best}"]
    new = case.batch
    expected = runs[f"fused {best}"]()[:new].float()
    differences = [
        float((run()[:new].float() - expected).abs().max())
        for name, run in runs.items()
        if not name.startswith("fused ")
    ]
    seconds = median[f"fused {best}"]
    return Result(
        case=case,
        milliseconds={name: 1e3 * t for name, t in median.items()},
        ratio={
            name: statistics.median(a / b for a, b in zip(times[name], own, strict=True))
            for name in runs
        },
        best_delta=best,
        read_share=setting.kv_bytes / seconds / 1e9 / device_limits["copy GB/s"],
        multiply_share=setting.flops / seconds / 1e12 / device_limits["TFLOP/s"],
        largest_difference=max(differences, default=0.0),
    )


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each run in every round, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                runs[name]()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) / 1e3 / CALLS)
    return times


class Setting:
    """The tensors of a case, and its step in three forms.

    `mixed` has blocks missing. `recompute` and `decode` are the same rows with a unit for every
    block: the KV computed again is in the pool, as it is for systems that keep all of it.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        blocks = -(-case.context // BLOCK_TOKENS)
        units = torch.randperm(case.batch * blocks).view(case.batch, blocks) + 1
        size = (units.numel() + 1, LAYERS, 2, BLOCK_TOKENS, case.kv_heads, case.head_dim)
        pool = torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(-1, 1)
        self.keys, self.values = pool[:, 0, 0], pool[:, 0, 1]
        self.mixed, self.recompute, self.decode = layouts(case, units, device)
        rows = self.mixed.rows
        self.q, self.k, self.v = (
            torch.randn(rows, heads, case.head_dim, device=device).to(torch.bfloat16)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        )
        self.scale = case.head_dim**-0.5
        self.kv_bytes = 4 * case.batch * case.context * case.kv_heads * case.head_dim
        ranges = [r for request in self.mixed.requests for r in (request.new, *request.spans)]
        pairs = sum(r.size * r.position + r.size * (r.size + 1) // 2 for r in ranges)
        self.flops = 4 * case.heads * case.head_dim * pairs

    def run(self, kernel: Any, layout: GroupLayout, rows: slice, **options: Any) -> torch.Tensor:
        """`kernel` on these rows of the step."""
        q, k, v = self.q[rows], self.k[rows], self.v[rows]
        out = kernel(q, k, v, self.keys, self.values, layout, self.scale, **options)
        assert isinstance(out, torch.Tensor)
        return out

    def run_apart(self, kernel: Any) -> torch.Tensor:
        """`kernel` on the recomputed rows, then on the decoded ones; returns the latter's."""
        new = self.case.batch
        if self.recompute.rows:
            self.run(kernel, self.recompute, slice(new, None))
        return self.run(kernel, self.decode, slice(0, new))


def layouts(
    case: Case, units: torch.Tensor, device: torch.device
) -> tuple[GroupLayout, GroupLayout, GroupLayout]:
    """(mixed, recompute alone, decode alone); see `Setting`. `units`: [batch, blocks]."""
    batch, blocks = units.shape
    before = case.context - 1
    missing = int(case.missing * before) // BLOCK_TOKENS * BLOCK_TOKENS
    own = [slice(i * blocks, (i + 1) * blocks) for i in range(batch)]
    new = [RowRange(i, before, 1) for i in range(batch)]
    spans = [RowRange(i * missing, 0, missing) for i in range(batch)]

    def layout(rows: int, requests: list[RequestLayout], positions: torch.Tensor) -> GroupLayout:
        """The first rows are written: those at `positions` of every request."""
        return GroupLayout.of(
            rows=rows,
            requests=tuple(requests),
            units=units.flatten().to(device),
            write_rows=slice(0, batch * len(positions)),
            write_units=units[:, positions // BLOCK_TOKENS].flatten().to(device),
            write_offsets=(positions % BLOCK_TOKENS).repeat(batch).to(device),
        )

    def beside(span: RowRange) -> tuple[RowRange, ...]:
        return (span._replace(row=batch + span.row),) if missing else ()

    last, first = torch.tensor([before]), torch.arange(missing)
    mixed = [RequestLayout(n, beside(s), o, False) for n, s, o in zip(new, spans, own, strict=True)]
    apart = [RequestLayout(s, (), o, False) for s, o in zip(spans, own, strict=True)]
    whole = [RequestLayout(n, (), o, False) for n, o in zip(new, own, strict=True)]
    return (
        layout(batch * (1 + missing), mixed, last),
        layout(batch * missing, apart if missing else [], first),
        layout(batch, whole, last),
    )


def peers(setting: Setting) -> dict[str, Run]:
    """Everything compared; FlashInfer's only where it is installed."""
    from ellm_sgl.kernels.experimental.triton.attention import FusedAttention

    everything = slice(0, None)
    kernel = FusedAttention(setting.keys.device)

    def fused(delta: int) -> Run:
        return lambda: setting.run(kernel, setting.mixed, everything, delta=delta / 1024)

    runs = {f"fused {delta}": fused(delta) for delta in DELTAS}
    # Layouts are prepared once per layer group: one object for each keeps its own.
    first, second = FusedAttention(setting.keys.device), FusedAttention(setting.keys.device)

    def apart(*args: Any) -> torch.Tensor:
        return (first if args[5] is setting.recompute else second)(*args)

    runs["fused, apart"] = lambda: setting.run_apart(apart)
    if importlib.util.find_spec("flashinfer") is None:
        return runs
    parts = FlashInferAttention(setting.keys.device)
    runs["flashinfer in parts"] = lambda: setting.run(parts, setting.mixed, everything)
    return runs | whole_flashinfer(setting, importlib.import_module("flashinfer"))


def whole_flashinfer(setting: Setting, library: Any) -> dict[str, Run]:
    """FlashInfer (`library`) with everything in the pool: in two launches, and in one."""
    case, device, pool = setting.case, setting.keys.device, (setting.keys, setting.values)
    workspace = torch.zeros(2 * WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    shape = case.heads, case.kv_heads, case.head_dim, BLOCK_TOKENS
    types = {
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
        "sm_scale": setting.scale,
    }
    decoded = divide(setting.decode, BLOCK_TOKENS, case.batch).decode
    d_pages = _on(device, decoded, setting.decode)
    q_new, q_span = setting.q[: case.batch], setting.q[case.batch :]
    decode = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=case.heads // case.kv_heads >= 4
    )
    decode.plan(*d_pages, *shape, **types)
    if not setting.recompute.rows:
        return {"flashinfer, apart": lambda: decode.run(q_new, pool)}
    p_starts, p_pages = _prefill_pages(setting, device)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(p_starts, *p_pages, *shape, causal=True, **types)

    def apart() -> torch.Tensor:
        prefill.run(q_span, pool)
        out = decode.run(q_new, pool)
        assert isinstance(out, torch.Tensor)
        return out

    pod = library.BatchPODWithPagedKVCacheWrapper(workspace.clone(), "NHD")
    d_starts = torch.arange(case.batch + 1, dtype=torch.int32)
    pod.plan(p_starts, *p_pages, d_starts, *d_pages, *shape, **types)
    return {
        "flashinfer, apart": apart,
        "flashinfer POD": lambda: pod.run(q_span, pool, q_new, pool, causal_p=True)[1],
    }


def _on(device: torch.device, pages: Pages, layout: GroupLayout) -> tuple[torch.Tensor, ...]:
    """indptr, units and last page lengths as FlashInfer takes them."""
    units = layout.units[torch.from_numpy(pages.places).to(device)].to(torch.int32)
    indptr, last = (torch.from_numpy(a).to(torch.int32) for a in (pages.indptr, pages.last_tokens))
    return indptr, units, last


def _prefill_pages(
    setting: Setting, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Row starts and pages of the recomputed ranges: each attends to its own blocks."""
    requests = setting.recompute.requests
    counts = torch.tensor([0, *(r.new.size for r in requests)], dtype=torch.int32)
    blocks = counts // BLOCK_TOKENS
    units = [setting.recompute.units[r.blocks][: r.new.size // BLOCK_TOKENS] for r in requests]
    last = torch.full((len(requests),), BLOCK_TOKENS, dtype=torch.int32)
    indptr = blocks.cumsum(0).to(torch.int32)
    return counts.cumsum(0).to(torch.int32), (indptr, torch.cat(units).to(torch.int32), last)
