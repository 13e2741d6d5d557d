"""FlashInfer's wrappers in plain PyTorch: what they compute from the same plans, row by row.

Argument names and order are those of flashinfer-python 0.6.15.post1. Log-sum-exps are to base 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch


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


def _gather(
    cache: tuple[torch.Tensor, torch.Tensor], indices: torch.Tensor, last: int
) -> list[torch.Tensor]:
    page_size = cache[0].shape[1]
    tokens = (len(indices) - 1) * page_size + last
    return [x[indices.long()].flatten(0, 1)[:tokens] for x in cache]


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str, **_: Any) -> None:
        assert kv_layout == "NHD"

    def _ranges(self, q: torch.Tensor, starts: torch.Tensor, kv: Any, causal: bool) -> Any:
        assert int(starts[0]) == 0 and int(starts[-1]) == len(q)
        parts = [
            _attend(q[a:b], kv(i), self.scale, causal)
            for i, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    scale: float


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: Any,
        kv_data_type: Any, sm_scale: float,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert (last_page_len >= 1).all() and (last_page_len <= page_size).all()
        self.indptr, self.indices, self.last, self.scale = indptr, indices, last_page_len, sm_scale

    def run(self, q: torch.Tensor, cache: Any) -> torch.Tensor:
        out, _ = self._ranges(q, torch.arange(len(q) + 1), lambda i: self._kv(cache, i), False)
        return out

    def _kv(self, cache: Any, i: int) -> list[torch.Tensor]:
        own = self.indices[self.indptr[i] : self.indptr[i + 1]]
        return _gather(cache, own, int(self.last[i]))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any,
        paged_kv_last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, causal: bool = False, sm_scale: float = 0.0, q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self.starts, self.causal, self.scale = qo_indptr, causal, sm_scale
        self.indptr, self.indices = paged_kv_indptr, paged_kv_indices
        self.last = paged_kv_last_page_len

    def run(self, q: torch.Tensor, cache: Any, return_lse: bool = False) -> Any:
        def kv(i: int) -> list[torch.Tensor]:
            own = self.indices[self.indptr[i] : self.indptr[i + 1]]
            return _gather(cache, own, int(self.last[i]))

        out, lse = self._ranges(q, self.starts, kv, self.causal)
        return (out, lse) if return_lse else out


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, causal: bool = False, sm_scale: float = 0.0, q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        self.starts, self.kv_starts, self.causal, self.scale = (
            qo_indptr,
            kv_indptr,
            causal,
            sm_scale,
        )

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False
    ) -> Any:
        assert int(self.kv_starts[-1]) == len(k) == len(v)

        def kv(i: int) -> list[torch.Tensor]:
            return [x[self.kv_starts[i] : self.kv_starts[i + 1]] for x in (k, v)]

        out, lse = self._ranges(q, self.starts, kv, self.causal)
        return (out, lse) if return_lse else out


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.logaddexp2(s_a.double(), s_b.double())
    shares = [torch.exp2(s - both)[..., None] for s in (s_a.double(), s_b.double())]
    return (shares[0] * v_a + shares[1] * v_b).to(v_a.dtype), both.float()


class BatchPODWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr_p: Any, kv_indptr_p: Any, kv_indices_p: Any, last_page_len_p: Any,
        qo_indptr_d: Any, kv_indptr_d: Any, kv_indices_d: Any, last_page_len_d: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, sm_scale: float,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        self.parts = [BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), "NHD") for _ in range(2)]
        pages = kv_indptr_p, kv_indices_p, last_page_len_p
        self.parts[0].plan(qo_indptr_p, *pages, *sizes, causal=True, sm_scale=sm_scale)
        pages = kv_indptr_d, kv_indices_d, last_page_len_d
        self.parts[1].plan(qo_indptr_d, *pages, *sizes, sm_scale=sm_scale)

    def run(self, q_p: Any, cache_p: Any, q_d: Any, cache_d: Any, causal_p: bool) -> Any:
        assert causal_p
        prefill, decode = self.parts
        return prefill.run(q_p, cache_p), decode.run(q_d, cache_d)
