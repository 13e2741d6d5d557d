"""Open-loop replay: requests sent at their times, whatever the server does, every token timed.

Works with any SGLang server, stock or not (its native streaming API), and with any server that
speaks OpenAI's completions API, vLLM for one. Prompts are token ids, so that lengths are exact, or
text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ellm_sgl.client.process import CONNECTIONS

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Request:
    """One request of a workload."""

    at_s: float
    """When to send it, in seconds from the start."""
    prompt: tuple[int, ...] | str
    """Token ids, or text."""
    output_tokens: int
    """Tokens to ask for: exactly so many, or at most (`exact`)."""
    exact: bool = True
    """Ignore the end-of-sequence token, and let the server rely on the length."""
    priority: int | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    stop_after: int | None = None
    """Tokens after which the client wants no more and aborts, as one with a stop rule of its own
    does: an early stop that the server cannot foresee. SGLang's native API only."""

    def body(self) -> dict[str, Any]:
        """For `POST /generate`."""
        body: dict[str, Any] = {
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.output_tokens,
                "ignore_eos": self.exact,
            },
            "stream": True,
        }
        body["text" if isinstance(self.prompt, str) else "input_ids"] = self.prompt
        for name in ("priority", "tpot_slo_ms", "ttft_slo_ms"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        return body

    def openai_body(self, model: str) -> dict[str, Any]:
        """For `POST /v1/completions`. `ignore_eos` and the running count of tokens are extensions
        that SGLang and vLLM share; other servers are sent what they may refuse only if `exact`."""
        exact = {"ignore_eos": True} if self.exact else {}
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **exact,
        }


@dataclass
class Outcome:
    """What a client saw of one request. Times are in seconds from the start of the replay."""

    request: Request
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """When each token arrived; tokens that came together have one time."""
    output_ids: list[int] = field(default_factory=list)
    finish: str = ""
    """The server's reason ("length", "stop", "abort"), `INTERRUPTED` (Ctrl-C), or what went
    wrong."""

    @property
    def complete(self) -> bool:
        return self.finish in ("length", "stop")

    @property
    def stopped(self) -> bool:
        """Whether the client has all that it wants."""
        wanted = self.request.stop_after
        return wanted is not None and len(self.token_s) >= wanted

    def cut(self) -> None:
        """Forget the tokens that still came after the client had all that it wants."""
        if self.stopped:
            self.finish = "stop"
            del self.token_s[self.request.stop_after :]
            del self.output_ids[self.request.stop_after :]

    @property
    def ttft_s(self) -> float:
        """Time to first token; nan if none came."""
        return self.token_s[0] - self.sent_s if self.token_s else float("nan")

    @property
    def tpot_s(self) -> float:
        """Average time per output token after the first; nan with fewer than two."""
        if len(self.token_s) < 2:
            return float("nan")
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def longest_pause_s(self) -> float:
        """Longest wait for the next token; 0 with fewer than two."""
        return max((b - a for a, b in itertools.pairwise(self.token_s)), default=0.0)


def replay(
    url: str,
    requests: Sequence[Request],
    openai_model: str | None = None,
    began: float | None = None,
) -> list[Outcome]:
    """Send all requests at their times; returns when the last has ended, in their order.

    After Ctrl-C, or when the server dies, what the requests had got by then is returned; see
    `Outcome.finish`.

    Args:
        openai_model: use OpenAI's completions API, and this name of the model.
        began: the start, by `time.perf_counter`; None: now.
    """
    outcomes = [Outcome(request) for request in requests]
    try:
        asyncio.run(_replay(url, outcomes, openai_model, began))
    except KeyboardInterrupt:
        for outcome in outcomes:
            outcome.finish = outcome.finish or INTERRUPTED
    return outcomes


def replay_to_end(url: str, requests: Sequence[Request]) -> list[Outcome]:
    """`replay`, for those who have no use for part of it.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    outcomes = replay(url, requests)
    if any(o.finish == INTERRUPTED for o in outcomes):
        raise KeyboardInterrupt
    return outcomes


async def _replay(
    url: str, outcomes: list[Outcome], openai_model: str | None, began: float | None
) -> None:
    async with httpx.AsyncClient(
        base_url=url, limits=CONNECTIONS, timeout=None, trust_env=False
    ) as client:
        start = time.perf_counter() if began is None else began

        async def one(outcome: Outcome) -> None:
            await asyncio.sleep(max(outcome.request.at_s - (time.perf_counter() - start), 0))
            try:
                await _stream(client, outcome, start, openai_model)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                outcome.finish = f"{type(error).__name__}: {error}"
            outcome.cut()

        await asyncio.gather(*map(one, outcomes))


async def _stream(
    client: httpx.AsyncClient, outcome: Outcome, start: float, openai_model: str | None
) -> None:
    outcome.sent_s = time.perf_counter() - start
    if openai_model is None:
        path, body, take = "/generate", outcome.request.body(), _take_native
    else:
        path, take = "/v1/completions", _take_openai
        body = outcome.request.openai_body(openai_model)
    rid = uuid.uuid4().hex
    if outcome.request.stop_after is not None:
        body["rid"] = rid
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            outcome.finish = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                outcome.finish = str(chunk["error"])
                return
            satisfied = outcome.stopped
            take(outcome, chunk, time.perf_counter() - start)
            if outcome.stopped and not satisfied:
                await client.post("/abort_request", json={"rid": rid})


def _take_native(outcome: Outcome, chunk: dict[str, Any], now: float) -> None:
    new = chunk["meta_info"]["completion_tokens"] - len(outcome.token_s)
    outcome.token_s += [now] * new
    outcome.output_ids = chunk["output_ids"]
    if reason := chunk["meta_info"]["finish_reason"]:
        outcome.finish = reason["type"]


def _take_openai(outcome: Outcome, chunk: dict[str, Any], now: float) -> None:
    """Counts a chunk with text as one token where the server does not count."""
    choices = chunk.get("choices") or []
    usage = chunk.get("usage")
    if usage is not None:
        new = usage["completion_tokens"] - len(outcome.token_s)
    else:
        new = sum(1 for choice in choices if choice.get("text"))
    outcome.token_s += [now] * new
    for choice in choices:
        outcome.finish = choice.get("finish_reason") or outcome.finish
