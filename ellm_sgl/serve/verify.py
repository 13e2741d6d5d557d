"""`ellm-sgl verify`: the same prompts with everything cached and with parts of the KV missing.

The reference is stock SGLang (eLLM off). It is compared with eLLM at several uncached ratios, and
with a pool so small that blocks are evicted under pressure, and again with a host tier: at every
split between layers that are fetched and layers that are recomputed; with hidden states of all
layers on the host instead of KV, or of half of them on the device; and with recomputation in a pass
of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ellm_sgl.config import ELLM, HCACHE, RECOMPUTE
from ellm_sgl.serve.process import DEMO_MODEL, ServerProcess, has_tokenizer
from ellm_sgl.sglang import cuda

LENGTHS = (1, 2, 15, 16, 17, 31, 48, 100, 200, 333, 500, 750, 1000, 1250, 1500)
"""Prompt lengths in tokens: around block boundaries, and up to many blocks."""
RATIOS = (0.0, 0.25, 0.5, 0.9)
EXACT = "float32"
DTYPES = (EXACT, "bfloat16")
FORCED = "forced eviction"
HOST_RATIO = 0.75
SPLITS = ((1, 0), (3, 1), (2, 1), (3, 2), (1, 1), (2, 2), (1, 2))
"""(l1, l2): layers fetched from the host to layers recomputed."""
HIDDEN_SPLITS = ((1, 0), (3, 1))
UNFUSED_SPLITS = ((1, 1), (0, 1))
QUICK_SPLITS = ((0, 1), (1, 1), (1, 0))
"""All recomputed, half of each, all fetched."""
LOGPROB_TOLERANCE = 1e-4
"""Largest |Δ log-probability| accepted in fp32."""
POOL_TOKENS = 16_384
BASELINE_OUTPUT_TOKENS = 160
"""At least so many, where a baseline is verified: prompts alone preempt nobody."""
EAGER = ("--schedule-conservativeness", "0.05")
"""SGLang admits with hardly a thought of outputs, so that requests get in each other's way."""
ON_CUDA = ("--attention-backend", "torch_native")
"""The one of stock SGLang's backends there that computes fp32 as fp32."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Output:
    """What the server answered to one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token."""


@dataclass(frozen=True)
class Comparison:
    """One setting against the reference."""

    dtype: str
    setting: str
    tokens: int
    agreeing: int
    """Tokens equal to the reference's, each counted up to its prompt's first difference."""
    max_logprob_difference: float
    """Over the agreeing tokens."""
    recomputed_tokens: int
    evicted_units: int
    fetched_units: int
    projected_units: int
    """Those of the fetched ones that came as hidden states."""
    retractions: int
    sat_out: int
    """Times that a running request began to sit out."""
    integrity: str

    @property
    def agreement(self) -> float:
        return self.agreeing / self.tokens

    @property
    def exact(self) -> bool:
        return self.agreeing == self.tokens and self.max_logprob_difference <= LOGPROB_TOLERANCE


@dataclass(frozen=True)
class VerifyReport:
    """All comparisons of one model."""

    model_path: str
    prompts: int
    output_tokens: int
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Every fp32 comparison is exact, and every table is consistent."""
        return all(c.integrity == "ok" and (c.exact or c.dtype != EXACT) for c in self.comparisons)

    def to_json(self) -> dict[str, object]:
        rows = [dataclasses.asdict(c) | {"agreement": c.agreement} for c in self.comparisons]
        return dataclasses.asdict(self) | {"comparisons": rows, "passed": self.passed}


def verify(
    model_path: str | None,
    say: Say,
    dtypes: Sequence[str] = DTYPES,
    lengths: Sequence[int] = LENGTHS,
    output_tokens: int = 16,
    layer_group: int = 4,
    block_tokens: int = 16,
    quick: bool = False,
    seed: int = 0,
    mode: str = ELLM,
) -> VerifyReport:
    """Compare eLLM with stock SGLang on one model; a minute or two per dtype on two cores.

    Args:
        model_path: a local model; None for the demo model.
        say: is told of progress, one line at a time.
        dtypes: of weights and KV.
        lengths: of the prompts, in tokens.
        output_tokens: generated per prompt, greedily, whatever the model says.
        layer_group: of eLLM's pool, but 1 where all splits are tried.
        block_tokens: of eLLM's pool.
        quick: one ratio and three splits instead of all, with hidden states of half of the
            layers on the host.
        seed: of the random prompts.
        mode: eLLM, or the baseline to verify instead.

    Raises:
        ServerError: a server did not start.
    """
    path = model_path or str(DEMO_MODEL)
    prompts = make_prompts(path, lengths, seed)
    if mode != ELLM:
        output_tokens = max(output_tokens, BASELINE_OUTPUT_TOKENS)
    comparisons: list[Comparison] = []
    for dtype in dtypes:
        common = ["--model-path", path, "--dtype", dtype, "--skip-tokenizer-init"]
        say(f"{dtype}: stock SGLang, everything cached")
        stock = [*common, "--max-total-tokens", str(2 * POOL_TOKENS)]
        with ServerProcess([*stock, *(ON_CUDA if cuda.available() else ())]) as server:
            reference = generate(server.url, prompts, output_tokens)
        compared = _Compared(dtype, prompts, output_tokens, reference, say)
        common += ["--ellm-block-tokens", str(block_tokens)]
        if mode != ELLM:
            comparisons += _baseline(compared, [*common, "--ellm-mode", mode, *EAGER], mode)
            continue
        common += ["--ellm-policy", "fixed-ratio", "--ellm-device-kv-tokens", str(2 * POOL_TOKENS)]
        # Half of the longest request fits: every long prompt loses blocks while it runs.
        small = max(max(lengths) // 2, 64)
        host = ["--ellm-host-kv-tokens", str(POOL_TOKENS)]
        group = ["--ellm-layer-group", str(layer_group)]
        half = str(-(-_model_config(path)["num_hidden_layers"] // 2))
        on_device = ["--ellm-hidden-on", "device", "--ellm-device-kv-tokens",
                     str(2 * POOL_TOKENS + _as_kv_tokens(path, POOL_TOKENS))]  # fmt: skip
        if quick:
            with ServerProcess([*common, *group, *host, "--ellm-host-keeps", half]) as server:
                comparisons += compared.splits(server, "mixed", QUICK_SPLITS, small)
            continue
        with ServerProcess([*common, *group]) as server:
            comparisons += [compared.with_ratio(server, f"r = {r}", ratio=r) for r in RATIOS]
            server.adjust(ellm_device_kv_tokens=small)
            comparisons.append(compared.with_ratio(server, FORCED))
        # Each split gives other layers only where a group is one layer.
        for name, setting, splits in (
            ("host", ["--ellm-host-keeps", "kv"], SPLITS),
            ("hidden", ["--ellm-host-keeps", "hidden"], HIDDEN_SPLITS),
            ("mixed", ["--ellm-host-keeps", half, *on_device], HIDDEN_SPLITS),
            ("unfused", ["--ellm-fusion", "off"], UNFUSED_SPLITS),
        ):
            tier = ["--ellm-layer-group", "1", *host, *setting]
            with ServerProcess([*common, *tier]) as server:
                tried = splits if dtype == EXACT else splits[:1]
                comparisons += compared.splits(server, name, tried, small)
    return VerifyReport(path, len(prompts), output_tokens, tuple(comparisons))


@dataclass(frozen=True)
class _Compared:
    """Runs the prompts on a server and compares the outputs with the reference."""

    dtype: str
    prompts: Sequence[Sequence[int]]
    output_tokens: int
    reference: Sequence[Output]
    say: Say

    def with_ratio(self, server: ServerProcess, setting: str, **policy: Any) -> Comparison:
        """`policy`: options of fixed-ratio."""
        server.switch_policy("fixed-ratio", **policy)
        return self.run(server, setting)

    def run(self, server: ServerProcess, setting: str) -> Comparison:
        self.say(f"{self.dtype}: eLLM, {setting}")
        server.flush_cache()
        before = server.state()
        outputs = generate(server.url, self.prompts, self.output_tokens)
        return compare(self.dtype, setting, self.reference, outputs, before, server.state())

    def splits(
        self, server: ServerProcess, name: str, splits: Sequence[tuple[int, int]], small: int
    ) -> list[Comparison]:
        """`splits` with a host tier, then a device of `small` tokens."""
        done = [
            self.with_ratio(server, f"{name} {l1}:{l2}", ratio=HOST_RATIO, layers=(l1, l2))
            for l1, l2 in splits
        ]
        server.adjust(ellm_device_kv_tokens=small)
        return [*done, self.with_ratio(server, f"{name}, {FORCED}")]


def _baseline(compared: _Compared, common: Sequence[str], mode: str) -> Iterator[Comparison]:
    """A baseline on a device that holds the longest request and little more; where it has a host
    tier, with one that holds all, and with one that is soon full.

    Args:
        common: arguments of the server beside memory.
    """
    tier = ["--ellm-layer-group", "1", "--ellm-host-kv-tokens"]
    hosts = {mode: [*tier, str(POOL_TOKENS)], f"{mode}, host full": [*tier, "256"]}
    if mode == RECOMPUTE:
        hosts = {mode: []}
    if mode == HCACHE:  # its partition, and hidden states of all layers
        hosts[f"{mode}, hidden"] = [*tier, str(POOL_TOKENS), "--ellm-host-keeps", "hidden"]
    device_tokens = max(map(len, compared.prompts)) + compared.output_tokens + 64
    for setting, host in hosts.items():
        memory = ["--ellm-device-kv-tokens", str(device_tokens), *host]
        with ServerProcess([*common, *memory]) as server:
            yield compared.run(server, setting)


def make_prompts(model_path: str, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids: a random prompt of each length, and English text where there is a tokenizer."""
    vocabulary = _model_config(model_path)["vocab_size"]
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    if has_tokenizer(model_path):
        from ellm_sgl.sglang.torchvision_ops import declare

        declare()
        from transformers import AutoTokenizer

        text = AutoTokenizer.from_pretrained(model_path).encode(str(Path.__doc__) * 20)
        prompts += [text[start : start + n] for start, n in ((0, 20), (7, 150), (40, 600))]
    return prompts


def _model_config(model_path: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    return config


def _as_kv_tokens(model_path: str, tokens: int) -> int:
    """As much memory as hidden states of so many tokens take, in tokens of KV."""
    config = _model_config(model_path)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv = 2 * config.get("num_key_value_heads", heads) * head_dim
    return int(-(-tokens * config["hidden_size"] // kv))


def generate(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Output]:
    """Greedy outputs of all prompts, sent at once."""
    return asyncio.run(_generate(url, prompts, output_tokens))


async def _generate(url: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Output]:
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}

    async with httpx.AsyncClient(timeout=900, trust_env=False) as client:

        async def one(prompt: Sequence[int]) -> Output:
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
            logprobs = answer["meta_info"]["output_token_logprobs"]
            return Output(tuple(answer["output_ids"]), tuple(entry[0] for entry in logprobs))

        return list(await asyncio.gather(*map(one, prompts)))


def compare(
    dtype: str,
    setting: str,
    reference: Sequence[Output],
    outputs: Sequence[Output],
    before: dict[str, int],
    after: dict[str, int],
) -> Comparison:
    """Compare token by token. `before`, `after`: the server's state around the run."""
    agreeing, largest = 0, 0.0
    for expected, got in zip(reference, outputs, strict=True):
        for i, token in enumerate(expected.token_ids):
            if i >= len(got.token_ids) or got.token_ids[i] != token:
                break
            agreeing += 1
            largest = max(largest, abs(expected.logprobs[i] - got.logprobs[i]))

    def gained(name: str) -> int:
        return after[name] - before[name]

    return Comparison(
        dtype=dtype,
        setting=setting,
        tokens=sum(len(o.token_ids) for o in reference),
        agreeing=agreeing,
        max_logprob_difference=largest,
        recomputed_tokens=gained("recomputed_tokens_total"),
        evicted_units=gained("evicted_units_total"),
        fetched_units=gained("fetched_units_total"),
        projected_units=gained("projected_units_total"),
        retractions=gained("retractions_total"),
        sat_out=gained("sat_out_total"),
        integrity=str(after["integrity"]),
    )
