"""What a block's KV depends on is in its name or in the store's fingerprint."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ellm_sgl.config import EllmConfig
from ellm_sgl.kernels.cpu.library import ISA_VARIABLE, instruction_set, load
from ellm_sgl.memory import KVPool, PageTable, PoolShape
from ellm_sgl.sglang.context import Context
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.versions import VERSIONS, adapter_of

declare()
NOT_NAMES = {"self", "token_ids", "is_bigram", "limit"}


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_are_kept_apart_as_in_the_tree(version: str) -> None:
    """Whatever a key of the tree is made of besides tokens."""
    adapter: Any = adapter_of(version)
    key = adapter.signatures["sglang.srt.mem_cache.radix_cache.RadixKey.__init__"]
    names = sorted(set(re.findall(r"\w+", key)) - NOT_NAMES)
    req: Any = SimpleNamespace(**{name: f"{name} of this" for name in names})
    assert sorted(adapter.namespaces(req)) == [f"{name} of this" for name in names]


def test_a_rank_whose_own_weights_have_stayed_has_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its KV depends on what the others' layers add to each output."""
    from ellm_sgl.sglang import fingerprint

    others = ["b" * 32]

    def gather(marks: list[str], mark: str, group: Any) -> None:
        assert group == "ranks"
        marks[:] = [mark, *others]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ranks = SimpleNamespace(tp_rank=0, tp_size=2)
    scheduler: Any = SimpleNamespace(ps=ranks, tp_group=SimpleNamespace(cpu_group="ranks"))

    def mark() -> str:
        return fingerprint._of_all_ranks("a" * 32, scheduler)

    before = mark()
    assert before == mark() and re.fullmatch("[0-9a-f]{32}", before)
    others[:] = ["c" * 32]
    assert mark() != before
    ranks.tp_size = 1
    assert mark() == "a" * 32


def test_the_fingerprint_knows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.runtime_context import get_parallel

    from ellm_sgl.sglang.fingerprint import _facts

    shape = PoolShape(num_layers=2, layer_group=1, block_tokens=4)
    pool = KVPool(shape, 1, 1, 8, torch.float32, "cpu")
    ours = Context(EllmConfig(), PageTable(shape, 8, 16), pool, 64)
    config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict), dtype=torch.float32)
    ranks = SimpleNamespace(tp_rank=0, tp_size=1)
    scheduler: Any = SimpleNamespace(model_config=config, ps=ranks)

    def facts() -> dict[str, Any]:
        with get_parallel().override(tp_rank=0, tp_size=1):
            return _facts(ours, scheduler)

    before = facts()
    assert torch.backends.cpu.get_cpu_capability() in before["torch"]
    if load().library is None:
        pytest.skip("C++ kernels are not built")
    if instruction_set(64) != instruction_set(64, "avx2"):  # which heads of 8 have in any case
        monkeypatch.setenv(ISA_VARIABLE, "avx2")
        assert facts() != before
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    portable = facts()
    assert portable != before
    monkeypatch.setattr("ellm_sgl.sglang.fingerprint.source_hash", lambda: "other")
    assert facts() != portable


@pytest.mark.parametrize(("chunk", "blocks"), [(500, 33), (None, 65)])
def test_what_a_prefill_computes_comes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None, blocks: int
) -> None:
    """And the block that the chunk before has begun: the store has room for it, and memory is set
    aside."""
    from ellm_sgl.sglang import fingerprint
    from ellm_sgl.store import store

    monkeypatch.setattr(store, "QUEUED_BYTES", 0)
    monkeypatch.setattr(store, "READ_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_facts", lambda *_: {})
    monkeypatch.setattr(fingerprint, "fingerprint", lambda *_: "a" * 32)
    shape = PoolShape(num_layers=1, layer_group=1, block_tokens=16)
    pool = KVPool(shape, 8, 1, 8, torch.float32, "cpu")
    settings = EllmConfig(kv_store=str(tmp_path))
    ours = Context(settings, PageTable(shape, 8, 8), pool, 64)
    scheduler: Any = SimpleNamespace(
        chunked_prefill_size=chunk,
        server_args=SimpleNamespace(max_prefill_tokens=1024),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
        ps=SimpleNamespace(tp_rank=0, tp_size=1),
    )
    opened = fingerprint.open_prefixes(ours, scheduler, lambda numbers: numbers)
    assert opened.store.room == blocks
    assert ours.memory.store == (blocks + 1) * opened.store.block_bytes
    assert ours.memory.queued() == 0
    waits: Any = SimpleNamespace(done=lambda: False)
    monkeypatch.setattr(opened.store, "_submit", lambda *_: waits)
    opened.store.put([b"1" * 16], 0, 1, lambda n: np.zeros((n, opened.store.block_bytes), np.uint8))
    assert ours.memory.queued() == opened.store.block_bytes
    assert opened.store.room == blocks - 1
