"""The clients of a soak (`eval/soak.py`): so many streams at once, each followed by the next."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from ellm_sgl.client.generate import generate
from ellm_sgl.client.process import CONNECTIONS
from ellm_sgl.client.workloads import PRINTABLE

CUT_OFF_SHARE = 0.33
PROMPT_TOKENS = (1, 150)
PREFIX_TOKENS = (10, 250)
PREFIX_SHARE = 0.6
"""Share of the requests that begin with one of six prefixes."""
OUTPUT_TOKENS = (1, 20)
KNOWN, KNOWN_SHARE = 40, 0.25
"""Prompts whose greedy answers are known, and the share of the requests that have one of them."""
PATIENCE_S = 120.0
"""A stream that brings nothing for so long has timed out."""

Until = Callable[[int], bool]
"""Whether the load is over, so many requests having been sent."""


@dataclass(frozen=True)
class Known:
    """A prompt and the first tokens of its greedy answer, max(OUTPUT_TOKENS) of them."""

    prompt: list[int]
    answer: tuple[int, ...]


@dataclass
class Tally:
    """What has become of requests."""

    requests: int = 0
    completed: int = 0
    cut_off: int = 0
    """Whom the client left in mid-stream."""
    checked: int = 0
    """Of both, those whose tokens were compared with the known ones,"""
    wrong: int = 0
    """and those that had others, or fewer than they were to have."""
    refused: int = 0
    """Times that a request was answered 429 with `Retry-After`, and came again after that."""
    timed_out: int = 0
    failed: int = 0
    """Any other end."""
    worst_ttft_s: float = 0.0
    """From when a request was sent, last, to its first token."""


def known_answers(url: str) -> list[Known]:
    """Asked of a server that has memory for all of them."""
    rng = random.Random(98)
    prompts = [_prompt(rng, _prefixes()) for _ in range(KNOWN)]
    answers = generate(url, prompts, max(OUTPUT_TOKENS))
    return [Known(*known) for known in zip(prompts, answers, strict=True)]


async def load(url: str, until: Until, seed: int, at_once: int, known: list[Known]) -> Tally:
    """Keep `at_once` streams under way until it is over, and then until the last has ended."""
    tally, prefixes = Tally(), _prefixes()

    async def worker(client: httpx.AsyncClient) -> None:
        while not until(tally.requests):
            rng = random.Random(seed * 1_000_000 + tally.requests)
            tally.requests += 1
            await _one(client, url, rng, prefixes, known, tally)

    timeout = httpx.Timeout(PATIENCE_S)
    async with httpx.AsyncClient(timeout=timeout, limits=CONNECTIONS, trust_env=False) as client:
        await asyncio.gather(*(worker(client) for _ in range(at_once)))
    return tally


def _prefixes() -> list[list[int]]:
    rng = random.Random(99)
    return [rng.choices(PRINTABLE, k=rng.randint(*PREFIX_TOKENS)) for _ in range(6)]


def _prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    prefix = rng.choice(prefixes) if rng.random() < PREFIX_SHARE else []
    return prefix + rng.choices(PRINTABLE, k=rng.randint(*PROMPT_TOKENS))


async def _one(
    client: httpx.AsyncClient,
    url: str,
    rng: random.Random,
    prefixes: list[list[int]],
    known: list[Known],
    tally: Tally,
) -> None:
    """One request to its end, however often it has to come again."""
    of_known = rng.choice(known) if rng.random() < KNOWN_SHARE else None
    tokens = rng.randint(*OUTPUT_TOKENS)
    sampling = {"max_new_tokens": tokens, "temperature": rng.choice([0, 1])}
    prompt = _prompt(rng, prefixes)
    if of_known is not None:
        sampling |= {"temperature": 0, "ignore_eos": True}
        prompt = of_known.prompt
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    leave_after = rng.randint(1, 10) if rng.random() < CUT_OFF_SHARE else None
    try:
        while (again_after_s := await _ask(client, url, body, leave_after, of_known, tally)) > 0:
            tally.refused += 1
            await asyncio.sleep(again_after_s)
    except httpx.TimeoutException:
        tally.timed_out += 1
    except httpx.TransportError:
        tally.failed += 1


async def _ask(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    leave_after: int | None,
    known: Known | None,
    tally: Tally,
) -> float:
    """Seconds after which to come again; 0: the request has ended, one way or another."""
    sent = time.monotonic()
    last: dict[str, Any] = {}
    left = False
    async with client.stream("POST", f"{url}/generate", json=body) as answer:
        if answer.status_code == 429 and answer.headers.get("Retry-After", "").isdigit():
            return max(float(answer.headers["Retry-After"]), 1.0)
        if answer.status_code != 200:
            tally.failed += 1
            return 0
        events = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not events:
                tally.worst_ttft_s = max(tally.worst_ttft_s, time.monotonic() - sent)
            events += 1
            last = json.loads(line.removeprefix("data: "))
            if left := events == leave_after:
                break  # closes the connection: SGLang aborts the request
    _count(last, left, body["sampling_params"]["max_new_tokens"], known, tally)
    return 0


def _count(
    last: dict[str, Any], left: bool, tokens: int, known: Known | None, tally: Tally
) -> None:
    """Enter a stream into the tally by its last event."""
    reason = last.get("meta_info", {}).get("finish_reason") or {}
    if not left and reason.get("type") not in ("length", "stop"):
        tally.failed += 1
        return
    tally.cut_off += left
    tally.completed += not left
    if known is not None:
        got = tuple(last["output_ids"])
        tally.checked += 1
        tally.wrong += got != known.answer[: len(got)] or (not left and len(got) != tokens)
