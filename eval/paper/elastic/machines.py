"""How the paper's machines divide their memory: the arithmetic that its Figs. 9 to 11 rest on.

Memory beside the weights is for KV and activations, of which a prefill step takes for each of its
rows the hidden state, the residual, and three vectors as wide as the MLP (gate, up, and their
product; OPT: two of its wider ones), in 16 bits. vLLM sets aside what the most rows take that a
step can have: without chunks those of the longest request.
"""

from __future__ import annotations

from functools import cache

from ellm_sgl.eval.paper.elastic.claims import CHUNK, CONTEXT, HOST_BYTES, PAIR, SMALL
from ellm_sgl.eval.simulator import Machine
from ellm_sgl.eval.simulator.machines import DEVICES, MODELS, Device, assemble
from ellm_sgl.latency import ModelShape

L40S = Device("l40s", 48e9, 362e12, 864e9, 25e9)
"""By its data sheet; PCIe 4, no NVLink."""
OPT_13B = ModelShape(40, 5120, 40, 40, 128, 13_653, 50_272)
"""Its MLP has two matrices of 5,120 x 20,480, which count as three of two thirds the width."""
LEAST_ROWS = 2048
"""vLLM's default of --max-num-batched-tokens, for contexts that are shorter."""


@cache
def machine(name: str) -> Machine:
    """One of the paper's, with its host memory and with all that is beside the weights for KV."""
    if name == SMALL:
        found = assemble(MODELS["llama3-8b"], DEVICES["a100-80g"], 1, name)
    else:
        found = assemble(OPT_13B, L40S, 2 if name == PAIR else 1, name, nvlink=False)
    return found.limited(None, found.host_tokens_in(HOST_BYTES[name]))


def row_bytes(shape: ModelShape) -> int:
    """Bytes of the activations of one row of a prefill step, on one rank."""
    return shape.weight_bytes * (2 * shape.hidden + 3 * shape.intermediate)


def row_tokens(found: Machine) -> float:
    """Tokens of KV that would have room there."""
    return row_bytes(found.shape) / found.shape.kv_bytes_per_token


def most_rows(name: str, system: str) -> int:
    """Rows that a prefill step can have."""
    return CHUNK if system == "vllm-cp" else max(CONTEXT[name], LEAST_ROWS)


def kv_tokens(name: str, system: str) -> int:
    """Tokens of KV that a system has memory for: but for `SHARING`, what a static split leaves."""
    found = machine(name)
    if system in SHARING:
        return found.kv_tokens
    return int(found.kv_tokens - most_rows(name, system) * row_tokens(found))


SHARING = ("intra", "host", "ellm")
"""Systems in which KV and activations share memory: that alone; with all of host memory for
prompts' KV; with as much of it as Alg. 2 allows."""
