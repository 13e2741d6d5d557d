"""Requests through the native API, for tests that compare outputs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

PRINTABLE = range(32, 127)


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of random bytes, `low` to `high` tokens long."""
    rng = random.Random(seed)
    return [[rng.choice(PRINTABLE) for _ in range(rng.randint(low, high))] for _ in range(count)]


def ask(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all bodies, sent at once to `/generate`."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=600) as client:
            answers = await asyncio.gather(
                *(client.post(f"{url}/generate", json=body) for body in bodies)
            )
        return [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(run())


def ask_as_one(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all bodies, sent as one request, so that they join in the same prefill.

    For penalties: under overlap scheduling SGLang counts a request's first output token twice or
    late, after who joined in the step before it (docs/architecture.md), so that on stock SGLang
    too the same requests sent one by one get different answers from one time to the next.
    """
    names = bodies[0].keys()
    body = {name: [body[name] for body in bodies] for name in names}
    answers: list[dict[str, Any]] = (
        httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status().json()
    )
    return answers


def greedy(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A body that asks for exactly `tokens` greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling | more}


def token_ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]
