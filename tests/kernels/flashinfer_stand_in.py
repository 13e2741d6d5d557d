"""FlashInfer's wrappers in plain PyTorch: what they compute from the same plans, row by row.

Every call is bound to FlashInfer's own signature and its tensors are held against their types and
shapes, as `flashinfer_signatures.json` has them. Log-sum-exps are to base 2.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

FACTS: dict[str, Any] = json.loads(
    Path(__file__).with_name("flashinfer_signatures.json").read_text()
)
SHAPE = re.compile(r"(\w+) \[(.+)\]")


@cache
def signature(name: str) -> inspect.Signature:
    """FlashInfer's signature, as recorded."""
    parameters = FACTS["functions"][name]["parameters"]
    return inspect.signature(eval(f"lambda {parameters}: None"))


def bind(
    name: str, *args: Any, known: dict[str, Any] | None = None, heeded: str = "", **options: Any
) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included.

    Args:
        name: of the function.
        known: sizes and types that the call's tensors must agree with.
        heeded: optional arguments that the stand-in heeds. No other may be given.

    Raises:
        TypeError: FlashInfer does not take this call.
        AssertionError: nor these tensors; or the stand-in does not know what a call asks for.
    """
    bound = signature(name).bind(*args, **options)
    parameters = signature(name).parameters
    for given in bound.arguments:
        assert parameters[given].default is inspect.Parameter.empty or given in heeded.split()
    bound.apply_defaults()
    known = {**(known or {}), **bound.arguments}
    for argument, fact in FACTS["functions"][name].get("tensors", {}).items():
        value = bound.arguments[argument]
        for tensor in value if isinstance(value, tuple) else (value,):
            if tensor is not None:
                _check(f"{name}, {argument}", tensor, fact, known)
    return {**known, **bound.arguments}


def _check(what: str, tensor: torch.Tensor, fact: str, known: dict[str, Any]) -> None:
    """`fact`: a type and sizes; names that are not `known` yet become known."""
    found = SHAPE.fullmatch(fact)
    assert found is not None
    dtype, sizes = found[1], found[2].split(", ")
    expected = getattr(torch, dtype, None) or known.setdefault(dtype, tensor.dtype)
    assert tensor.dtype == expected, f"{what}: {tensor.dtype}, not {expected}"
    assert tensor.dim() == len(sizes), f"{what}: {tensor.dim()} dimensions"
    assert tensor.stride(-1) == 1, f"{what}: strides {tensor.stride()}"
    for size, text in zip(tensor.shape, sizes, strict=True):
        symbol, _, more = text.partition(" + ")
        assert known.setdefault(symbol, size - int(more or 0)) == size - int(more or 0), what


def _check_starts(starts: torch.Tensor) -> None:
    assert int(starts[0]) == 0
    assert (starts.diff() >= 0).all()


def _check_pages(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
    _check_starts(indptr)
    assert (indptr.diff() > 0).all(), "a range without pages"
    assert (last >= 1).all() and (last <= page_size).all()


def _attend(
    q: torch.Tensor, kv: list[torch.Tensor], scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, d] over kv: K and V [m, kv_heads, d]; causal: the last query sees all."""
    group = q.shape[1] // kv[0].shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in kv)
    scores = torch.einsum("nhd,mhd->nhm", q.double(), k) * scale
    if causal:
        n, m = q.shape[0], k.shape[0]
        seen = torch.arange(m)[None] <= torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(~seen[:, None], -math.inf)
    out = torch.einsum("nhm,mhd->nhd", torch.softmax(scores, dim=-1), v)
    return out.to(q.dtype), (torch.logsumexp(scores, dim=-1) / math.log(2)).float()


class _Wrapper:
    """`planned`: what the last plan was given; None before the first."""

    planned: dict[str, Any] | None = None

    def _attend_ranges(self, q: torch.Tensor, starts: torch.Tensor, kv: Any, given: Any) -> Any:
        assert int(starts[-1]) == len(q)
        scale = given["sm_scale"] or q.shape[-1] ** -0.5
        ranges = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        parts = [
            _attend(q[a:b], kv(i), scale, given.get("causal", False))
            for i, (a, b) in enumerate(ranges)
        ]
        out, lse = map(torch.cat, zip(*parts, strict=True))
        return (out, lse) if given.get("return_lse") else out


class _Paged(_Wrapper):
    """`indptr`, `pages`, `last_tokens`: what the kernel reads; the tensors that `plan` was given,
    or with a CUDA graph the buffers that the wrapper was made with."""

    indptr: torch.Tensor
    pages: torch.Tensor
    last_tokens: torch.Tensor

    def _attend_pages(self, q: torch.Tensor, starts: torch.Tensor, cache: Any, given: Any) -> Any:
        assert isinstance(cache, tuple) and cache[0].stride() == cache[1].stride()

        def kv(i: int) -> list[torch.Tensor]:
            pages = self.pages[self.indptr[i] : self.indptr[i + 1]].long()
            size = cache[0].shape[1]
            assert (pages >= 0).all() and (pages < len(cache[0])).all()
            tokens = (len(pages) - 1) * size + int(self.last_tokens[i])
            return [x[pages].flatten(0, 1)[:tokens] for x in cache]

        return self._attend_ranges(q, starts, kv, given)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(self, *args: Any, **options: Any) -> None:
        heeded = "kv_layout use_tensor_cores backend use_cuda_graph paged_kv_indptr_buffer "
        heeded += "paged_kv_indices_buffer paged_kv_last_page_len_buffer"
        name = "BatchDecodeWithPagedKVCacheWrapper.__init__"
        self.made = made = bind(name, self, *args, heeded=heeded, **options)
        assert made["kv_layout"] == "NHD" and made["backend"] in ("auto", "fa2")
        if made["use_cuda_graph"]:
            self.indptr = made["paged_kv_indptr_buffer"]
            self.pages = made["paged_kv_indices_buffer"]
            self.last_tokens = made["paged_kv_last_page_len_buffer"]

    def plan(self, *args: Any, **options: Any) -> None:
        bind("BatchDecodeWithPagedKVCacheWrapper.plan", self, *args, **options)
        heeded = "q_data_type kv_data_type sm_scale"
        name = "BatchDecodeWithPagedKVCacheWrapper._plan_impl"
        given = self.planned = bind(name, self, *args, heeded=heeded, **options)
        indptr, pages, last = given["indptr"], given["indices"], given["last_page_len"]
        _check_pages(indptr, last, given["page_size"])
        assert given["pages"] == int(indptr[-1])
        if not self.made["use_cuda_graph"]:
            self.indptr, self.pages, self.last_tokens = indptr, pages, last
            return
        assert given["batch"] == self.made["fixed batch"] and len(pages) <= len(self.pages)
        self.indptr.copy_(indptr)
        self.last_tokens.copy_(last)
        self.pages[: len(pages)].copy_(pages)

    def run(self, *args: Any, **options: Any) -> Any:
        name = "BatchDecodeWithPagedKVCacheWrapper.run"
        return self._decode(bind(name, self, *args, known=self.planned, **options))

    def forward(self, *args: Any, **options: Any) -> Any:
        name = "BatchDecodeWithPagedKVCacheWrapper.forward"
        return self._decode(
            bind(name, self, *args, known=self.planned, heeded="sm_scale", **options)
        )

    def _decode(self, given: dict[str, Any]) -> Any:
        assert self.planned is not None and given["rows"] == given["batch"]
        starts = torch.arange(given["rows"] + 1)
        return self._attend_pages(given["q"], starts, given["paged_kv_cache"], given)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, *args: Any, **options: Any) -> None:
        name = "BatchPrefillWithPagedKVCacheWrapper.__init__"
        made = bind(name, self, *args, heeded="kv_layout backend", **options)
        assert made["kv_layout"] == "NHD" and made["backend"] in ("auto", "fa2")

    def plan(self, *args: Any, **options: Any) -> None:
        heeded = "causal sm_scale q_data_type kv_data_type"
        name = "BatchPrefillWithPagedKVCacheWrapper.plan"
        given = self.planned = bind(name, self, *args, heeded=heeded, **options)
        _check_starts(given["qo_indptr"])
        self.indptr, self.pages = given["paged_kv_indptr"], given["paged_kv_indices"]
        self.last_tokens = given["paged_kv_last_page_len"]
        _check_pages(self.indptr, self.last_tokens, given["page_size"])
        assert given["pages"] == int(self.indptr[-1])
        given["head_dim"] = given["head_dim_qk"]

    def run(self, *args: Any, **options: Any) -> Any:
        assert self.planned is not None
        name = "BatchPrefillWithPagedKVCacheWrapper.run"
        given = bind(name, self, *args, known=self.planned, heeded="return_lse", **options)
        return self._attend_pages(given["q"], given["qo_indptr"], given["paged_kv_cache"], given)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(self, *args: Any, **options: Any) -> None:
        name = "BatchPrefillWithRaggedKVCacheWrapper.__init__"
        made = bind(name, self, *args, heeded="kv_layout", **options)
        assert made["kv_layout"] == "NHD"

    def plan(self, *args: Any, **options: Any) -> None:
        heeded = "causal sm_scale q_data_type kv_data_type"
        name = "BatchPrefillWithRaggedKVCacheWrapper.plan"
        given = self.planned = bind(name, self, *args, heeded=heeded, **options)
        _check_starts(given["qo_indptr"])
        _check_starts(given["kv_indptr"])
        given["head_dim"] = given["head_dim_qk"]

    def run(self, *args: Any, **options: Any) -> Any:
        assert self.planned is not None
        name = "BatchPrefillWithRaggedKVCacheWrapper.run"
        given = bind(name, self, *args, known=self.planned, heeded="return_lse", **options)
        starts = given["kv_indptr"]
        assert int(starts[-1]) == given["kv rows"]

        def kv(i: int) -> list[torch.Tensor]:
            return [given[x][starts[i] : starts[i + 1]] for x in "kv"]

        return self._attend_ranges(given["q"], given["qo_indptr"], kv, given)


def merge_state(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = bind("merge_state", *args, **options)
    v_a, s_a, v_b, s_b = (given[name] for name in ("v_a", "s_a", "v_b", "s_b"))
    assert all(x.is_contiguous() for x in (v_a, s_a, v_b, s_b))
    assert given["heads"] * given["head_dim"] <= 8 * 1024, "threads of a block"
    both = torch.logaddexp2(s_a.double(), s_b.double())
    shares = [torch.exp2(s - both)[..., None] for s in (s_a.double(), s_b.double())]
    return (shares[0] * v_a + shares[1] * v_b).to(v_a.dtype), both.float()


class BatchPODWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, *args: Any, **options: Any) -> None:
        made = bind(
            "BatchPODWithPagedKVCacheWrapper.__init__", self, *args, heeded="kv_layout", **options
        )
        self.parts = [
            BatchPrefillWithPagedKVCacheWrapper(made["float_workspace_buffer"], made["kv_layout"])
            for _ in range(2)
        ]

    def plan(self, *args: Any, **options: Any) -> None:
        heeded = "q_data_type kv_data_type sm_scale"
        name = "BatchPODWithPagedKVCacheWrapper.plan"
        given = self.planned = bind(name, self, *args, heeded=heeded, **options)
        sizes = (given[x] for x in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"))
        shared = *sizes, {x: given[x] for x in heeded.split()}
        for part, side in zip(self.parts, "pd", strict=True):
            names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
            pages = (given[f"{name}_{side}"] for name in names)
            part.plan(*pages, *shared[:-1], causal=side == "p", **shared[-1])

    def run(self, *args: Any, **options: Any) -> Any:
        name = "BatchPODWithPagedKVCacheWrapper.run"
        given = bind(name, self, *args, known=self.planned, heeded="causal_p", **options)
        assert given["causal_p"]
        return tuple(
            part.run(given[f"q_{side}"], given[f"paged_kv_cache_{side}"])
            for part, side in zip(self.parts, "pd", strict=True)
        )
