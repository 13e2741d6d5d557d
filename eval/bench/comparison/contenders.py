"""The servers: eLLM, its baseline modes and stock SGLang.

The baselines move whole requests and leave admission to SGLang, whose conservativeness is given to
each: eLLM is compared with the best of all these. A conservativeness of 0 is vLLM's admission, of
whatever prompt fits, as near as SGLang comes to it: whatever its conservativeness, it wants room
for all that a newcomer may generate, so that it is told to expect a token of anybody. Where output
lengths are known it goes by them, and by no conservativeness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ellm_sgl.client.process import DEMO_ARGUMENTS, has_tokenizer
from ellm_sgl.eval.bench.comparison.load import Load

ELLM, STOCK = "ellm", "stock"
DEFAULT_CONSERVATIVENESS = 1.0
"""SGLang's; servers with it have no number in their names."""
EAGER = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
"""Environment of servers with a conservativeness of 0."""


class Contender(NamedTuple):
    """How a server is started."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}


def contenders(
    load: Load,
    *,
    model_path: str | None,
    policy: str,
    layer_group: int,
    conservativeness: Sequence[float],
) -> dict[str, Contender]:
    """`ELLM` first, by the names of the table's rows.

    `ELLM` has the load's ample memory, and is told how much of it to use.
    """
    slo = () if load.tpot_slo_ms is None else ("--ellm-tpot-slo-ms", str(load.tpot_slo_ms))
    ours = ("--ellm-layer-group", str(layer_group), *slo)
    pool = ("--ellm-device-kv-tokens", str(load.device_tokens), *ours)
    host = ("--ellm-host-kv-tokens", str(load.ample_tokens))
    wide = ("--ellm-device-kv-tokens", str(load.ample_tokens), *ours)
    baselines: dict[str, tuple[str, ...]] = {
        "hcache": ("--ellm-mode", "hcache", *pool, *host),
        "recompute": ("--ellm-mode", "recompute", *pool),
        STOCK: ("--max-total-tokens", str(load.device_tokens)),
        "swap": ("--ellm-mode", "swap", *pool, *host),
    }
    shared = (*_model(model_path), "--disable-radix-cache")
    every = {ELLM: Contender((*shared, "--ellm-policy", policy, *wide, *host))}
    for name, own in baselines.items():
        for value in sorted(conservativeness, reverse=True):
            row = name if value == DEFAULT_CONSERVATIVENESS else f"{name} {value:g}"
            admission = ("--schedule-conservativeness", str(value))
            every[row] = Contender((*shared, *own, *admission), {} if value else EAGER)
    return every


def _model(path: str | None) -> tuple[str, ...]:
    """The demo model unless another is named."""
    if path is None:
        return DEMO_ARGUMENTS
    tokenizer = () if has_tokenizer(path) else ("--skip-tokenizer-init",)
    return ("--model-path", path, *tokenizer)
