"""`verify`: all settings of one model, in each dtype."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ellm_sgl.client.preload import preloaded
from ellm_sgl.client.process import DEMO_MODEL, environment_with
from ellm_sgl.config import ELLM
from ellm_sgl.eval.simulator.machines import read_model
from ellm_sgl.serve.verify.figures import Comparison, VerifyReport
from ellm_sgl.serve.verify.loads import Aborts, AtOnce, Chats, Load, make_prompts
from ellm_sgl.serve.verify.one_dtype import OneDtype
from ellm_sgl.serve.verify.rounding import EXACT, LEAST_TOKENS
from ellm_sgl.serve.verify.setting import ABORTS, CHATS, PROMPTS, Sizes
from ellm_sgl.serve.verify.stages import LEAST_RATIO, left_out, stages
from ellm_sgl.sglang import cuda

LENGTHS = (1, 2, 15, 16, 17, 31, 48, 100, 200, 333, 500, 750, 1000, 1250, 1500)
"""Prompt lengths in tokens: around block boundaries, and up to many blocks."""
DTYPES = (EXACT, "bfloat16")

SEED = 0
"""Of random prompts."""
BASELINE_OUTPUT_TOKENS = 160
"""At least so many, where a baseline is verified: prompts alone preempt nobody."""


def default_dtypes() -> tuple[str, ...]:
    """Those that SGLang can compute in on this host: on CUDA its norms have no kernel for fp32."""
    return tuple(d for d in DTYPES if d != EXACT) if cuda.available() else DTYPES


def verify(
    model_path: str | None,
    dtypes: Sequence[str],
    lengths: Sequence[int],
    output_tokens: int,
    layer_group: int,
    block_tokens: int,
    quick: bool,
    mode: str,
    resizes: int = 0,
) -> VerifyReport:
    """Compare eLLM with stock SGLang on one model; some minutes per dtype on two cores.

    Args:
        model_path: a local model; None for the demo model.
        lengths: of the prompts, in tokens.
        output_tokens: generated per prompt, greedily, whatever the model says.
        layer_group: of eLLM's pool, but 1 where all splits are tried.
        quick: three splits with hidden states of half of the layers on the host, forced eviction,
            and in fp32 chats; instead of all.
        mode: eLLM, or the baseline to verify instead.
        resizes: of the pool, at random, while each setting's load runs; 0: only in the settings
            that are for it.

    Raises:
        ServerError: a server did not start, or refused a request.
        ValueError: numbers with which nothing could be shown.
    """
    _check(dtypes, lengths, output_tokens, block_tokens)
    if resizes and mode != ELLM:
        raise ValueError(f"--resizes {resizes}: only of eLLM, not of mode {mode}; leave it out")
    path = model_path or str(DEMO_MODEL)
    if mode != ELLM:
        output_tokens = max(output_tokens, BASELINE_OUTPUT_TOKENS)
    shape, rng = read_model(Path(path) / "config.json"), random.Random(SEED)
    prompts = make_prompts(path, shape.vocabulary, lengths, SEED)
    longest = max(map(len, prompts))
    loads: dict[str, Load] = {PROMPTS: AtOnce(prompts, output_tokens)}
    if mode == ELLM:
        limit = longest + output_tokens
        loads[CHATS] = Chats.up_to(limit, shape.vocabulary, rng)
        loads[ABORTS] = Aborts.up_to(limit, shape.vocabulary, rng)
    needed = {name: load.most_tokens for name, load in loads.items()}
    sizes = Sizes(shape, longest, output_tokens, needed, layer_group, block_tokens)
    comparisons: list[Comparison] = []
    with preloaded(environment_with({})):
        for dtype in dtypes:
            one = OneDtype(path, dtype, shape, loads, block_tokens)
            asked = stages(dtype, mode, quick, sizes)
            comparisons += one.compared(s.with_resizes(resizes) if resizes else s for s in asked)
    skipped = tuple(left_out(mode, quick, dtypes, shape))
    return VerifyReport(
        path, len(prompts), output_tokens, tuple(comparisons), tuple(dtypes), skipped
    )


def _check(
    dtypes: Sequence[str], lengths: Sequence[int], output_tokens: int, block_tokens: int
) -> None:
    """Refuse what would show nothing, and what SGLang cannot compute."""
    if EXACT in dtypes and cuda.available():
        raise ValueError(
            f"--dtype {EXACT}: SGLang's norms have no kernel for it on CUDA devices; give bfloat16 "
            "or float16"
        )
    most, least = max(lengths) + output_tokens, round(2 * block_tokens / LEAST_RATIO)
    if most < least:
        raise ValueError(
            f"requests of at most {most} tokens are too short to lose a block of {block_tokens}: "
            f"prompt and output must have {least} together"
        )
    tokens = len(lengths) * output_tokens
    if tokens < LEAST_TOKENS and any(d != EXACT for d in dtypes):
        raise ValueError(
            f"{tokens} tokens of output do not tell how large rounding is in 16 bits: "
            f"{LEAST_TOKENS} are needed; ask for more per prompt, or allow longer prompts"
        )
