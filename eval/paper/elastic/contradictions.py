"""Where figures of the paper on elastic memory do not fit its others: the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from ellm_sgl.eval.paper.bounds import served
from ellm_sgl.eval.paper.contradiction import Contradiction
from ellm_sgl.eval.paper.elastic import claims
from ellm_sgl.eval.paper.elastic.claims import CONTEXT, PAIR, SMALL
from ellm_sgl.eval.paper.elastic.machines import kv_tokens, machine, most_rows, row_bytes
from ellm_sgl.eval.paper.elastic.plan import MAX_RUNNING, lengths, slos
from ellm_sgl.eval.simulator import Settings
from ellm_sgl.eval.simulator.machines import MEMORY_SHARE

LOAD = "2k-2k"
"""Where the paper's gains are largest."""


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """All that were found; `settings` name the latency model."""
    split, chunks, shared = (kv_tokens(SMALL, system) for system in ("vllm", "vllm-cp", "ellm"))
    yield Contradiction(
        "elastic memory, §6.1", f"vLLM serves Llama3-8B with a context of {CONTEXT[SMALL]:,} "
        "tokens on one A100, prefill in one piece",
        f"{MEMORY_SHARE:.0%} of 80 GB less the weights, less "
        f"{CONTEXT[SMALL] * row_bytes(machine(SMALL).shape) / 1e9:.1f} GB of activations, holds "
        f"{split:,} tokens: less than one such request, for which vLLM refuses to start. The paper "
        "does not say what share of memory it had.",
    )  # fmt: skip
    yield Contradiction(
        "elastic memory, §6.2", f"{claims.TTFT['vllm-cp']:g}x shorter TTFT and "
        f"{claims.GOODPUT['vllm-cp']:g}x the goodput of vLLM with chunked prefill, by shifting "
        "memory between activations and KV",
        f"Chunks of {claims.CHUNK} leave {chunks:,} tokens for KV, sharing at most {shared:,}: "
        f"{shared / chunks - 1:.1%} more. What is gained over chunks is host memory's.",
    )  # fmt: skip
    yield _goodput(settings, split, shared)
    yield Contradiction(
        "elastic memory, Fig. 10", "OPT-13B on two L40S as an example of gains from elastic memory",
        f"Its context is {CONTEXT[PAIR]:,} tokens; activations of as many rows take "
        f"{most_rows(PAIR, 'vllm') * row_bytes(machine(PAIR).shape) / 1e9:.2f} GB of 48 on each "
        f"device, {kv_tokens(PAIR, 'ellm') / kv_tokens(PAIR, 'vllm') - 1:.1%} of its KV.",
    )  # fmt: skip
    yield Contradiction(
        "elastic memory, Alg. 1", "admits while P_T, all physical chunks, less what the new "
        "requests need is above the threshold",
        "KV of requests that run is counted nowhere. With P_T read as what is free, prompts find "
        "no room for their activations whenever memory is full of KV, and none goes to host "
        "memory; here running KV makes way for them.",
    )  # fmt: skip


def _goodput(settings: Settings, split: int, shared: int) -> Contradiction:
    least, most = (
        served(
            machine(SMALL).limited(tokens, None),
            Settings(latency_model=settings.latency_model, max_running=MAX_RUNNING),
            *lengths(LOAD),
        )
        for tokens in (split, shared)
    )
    ttft, tpot = slos(SMALL, LOAD, settings.latency_model)
    return Contradiction(
        f"elastic memory, §6.2, §6.5, {LOAD}", f"goodput {claims.GOODPUT['vllm']:g}x vLLM's, "
        f"throughput {claims.OUTPUT:g}x",
        f"A rate that is served without end is at most the throughput: {most / least:.2f}x by the "
        f"latency model, with {shared / split:.2f}x the KV. More is within the SLOs only while "
        f"requests are few: a TPOT of {1e3 * tpot:.0f} ms lets each wait up to "
        f"{tpot * (lengths(LOAD)[1] - 1):,.0f} s behind a first token that came within "
        f"{ttft:.1f} s.",
    )  # fmt: skip
