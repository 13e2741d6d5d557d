"""Asks a server for tokens: whole answers, streams that are given up, scores of given tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from ellm_sgl.client.process import CONNECTIONS, ServerError

TIMEOUT_S = 900.0
STALL_S = 0.05
"""A stream that brings nothing for so long counts as stalled: its request may be paused."""
SWING_S = 0.25
OVERTAKEN_S, LOOK_S = 0.5, 0.01
UNDER_WAY = "under way"

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """What the server answered to one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each token."""


@dataclass(frozen=True)
class Answer:
    """An output and what it answers."""

    prompt: tuple[int, ...]
    asked: int
    """Tokens that were asked for."""
    output: Output
    aborted: bool = False
    """The client gave the stream up in the middle: it had begun, and had not ended."""


@dataclass
class Resizes:
    """Of a pool, while something else goes on."""

    left: int
    """That are not over,"""
    outcomes: Counter[str] = field(default_factory=Counter)
    """and what has become of those that are, as `/ellm/state` calls it."""
    failed: Callable[[], bool] = bool
    """Whether there are no more because one could not be asked for."""


class Client:
    """Greedy requests to the server at `url`, through `/generate`.

    All methods raise ServerError if the server refuses a request or ends a stream with an error,
    and httpx.TransportError if it goes away.
    """

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url, self._http = url, http

    async def complete(self, prompt: Sequence[int], tokens: int) -> Answer:
        """The answer of exactly `tokens` tokens, whatever the model says."""
        answer = await self._post("/generate", _body(prompt, tokens))
        return Answer(tuple(prompt), tokens, _output(answer))

    async def token_ids(self, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Those of `complete`, of a request that asks for nothing else."""
        answer = await self._post("/generate", _greedy(prompt, tokens))
        return tuple(answer["output_ids"])

    async def drop(
        self, prompt: Sequence[int], tokens: int, after: int, when_stalled: bool
    ) -> Answer:
        """Close the connection of a stream once `after` tokens have come, or at its first stall
        from then on; at half of the tokens at the latest."""
        last: dict[str, Any] | None = None
        async with self._stream(prompt, tokens) as pieces:
            while len(_ids(last)) < tokens // 2:
                begun = when_stalled and len(_ids(last)) >= after
                try:
                    piece = await asyncio.wait_for(anext(pieces, None), STALL_S if begun else None)
                except TimeoutError:
                    break
                last = piece or last
                if piece is None or (not when_stalled and len(_ids(last)) >= after):
                    break
        return _given_up(prompt, tokens, last)

    async def abort(self, prompt: Sequence[int], tokens: int, after: int) -> Answer:
        """Ask the server to abort a stream once `after` tokens have come, and read it to its end:
        it counts as aborted only if the server says so."""
        last: dict[str, Any] | None = None
        sent = False
        async with self._stream(prompt, tokens) as pieces:
            async for last in pieces:
                if not sent and len(_ids(last)) >= after:
                    await self._post("/abort_request", {"rid": last["meta_info"]["id"]})
                    sent = True
        reason = (last or {}).get("meta_info", {}).get("finish_reason") or {}
        if reason.get("type") == "abort":
            return _given_up(prompt, tokens, last)
        return Answer(tuple(prompt), tokens, _output(last))

    async def score(self, answer: Answer, vocabulary: int) -> tuple[float, ...]:
        """Log-probability of each token of the answer, all given to the server at once as a prompt
        (teacher forcing); NaN where the server tells none.

        Args:
            vocabulary: tokens of the model. Of the last one SGLang tells the log-probability, but
                calls it token 0.
        """
        tokens = answer.output.token_ids
        body = _body([*answer.prompt, *tokens], 1) | {
            "logprob_start_len": max(len(answer.prompt) - 1, 0)
        }
        scored = (await self._post("/generate", body))["meta_info"]["input_token_logprobs"]
        last = scored[len(scored) - len(tokens) :]
        named = [token if token < vocabulary - 1 else 0 for token in tokens]
        if [entry[1] for entry in last] != named:
            raise ServerError(f"tokens {[e[1] for e in last]} were scored, not {list(tokens)}")
        return tuple(map(_logprob, last))

    @contextlib.asynccontextmanager
    async def swinging(self, tokens: int, other: int) -> AsyncIterator[None]:
        """In this context the device pool has `other` and `tokens` tokens by turns, each for
        SWING_S; afterwards `tokens`."""

        async def swing() -> None:
            for size in itertools.cycle((other, tokens)):
                await self._resize(size)
                await asyncio.sleep(SWING_S)

        swings = asyncio.create_task(swing())
        try:
            yield
        finally:
            swings.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await swings
        await self._resize(tokens)

    @contextlib.asynccontextmanager
    async def resizing(self, sizes: Sequence[int], then: int) -> AsyncIterator[Resizes]:
        """In this context the device pool comes to these sizes, in tokens, one after the other;
        afterwards to `then`. What has become of one is known, or overtaken by the next, within
        OVERTAKEN_S."""
        found = Resizes(len(sizes))

        async def one(size: int) -> None:
            await self._resize(size)
            deadline = time.monotonic() + OVERTAKEN_S
            while (outcome := await self._outcome()) == UNDER_WAY and time.monotonic() < deadline:
                await asyncio.sleep(LOOK_S)
            found.outcomes[outcome] += 1
            found.left -= 1

        async def all_of_them() -> None:
            for size in sizes:
                await one(size)

        resizes = asyncio.create_task(all_of_them())
        found.failed = lambda: resizes.done() and resizes.exception() is not None
        try:
            yield found
            await resizes
        finally:
            resizes.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await resizes
        await self._resize(then)
        while await self._outcome() == UNDER_WAY:
            await asyncio.sleep(LOOK_S)

    async def _resize(self, size: int) -> None:
        body = {"server_args": {"ellm_device_kv_tokens": size}}
        if await self._post("/set_internal_state", body) not in (True, [True]):
            raise ServerError(f"the server refused a pool of {size} tokens")

    async def _outcome(self) -> str:
        """What has become of the size last asked for."""
        answer = await self._http.get(f"{self._url}/ellm/state", params={"integrity": False})
        _check(answer)
        return str(answer.json()["resize"]["outcome"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.post(self._url + path, json=body)
        _check(answer)
        return answer.json() if answer.content else None

    @contextlib.asynccontextmanager
    async def _stream(
        self, prompt: Sequence[int], tokens: int
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        body = _body(prompt, tokens) | {"stream": True}
        async with self._http.stream("POST", f"{self._url}/generate", json=body) as response:
            if response.is_error:
                await response.aread()
            _check(response)
            yield _pieces(response)


def run_with_client(url: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """`work` with a client of the server at `url`; returns what it returns."""

    async def run() -> T:
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S, trust_env=False, limits=CONNECTIONS
        ) as http:
            return await work(Client(url, http))

    return asyncio.run(run())


def generate(
    url: str, prompts: Sequence[Sequence[int]], output_tokens: int
) -> list[tuple[int, ...]]:
    """Greedy outputs of all prompts, sent at once: token ids alone, since log-probabilities cost
    the server time.

    Raises:
        ServerError: the server refused one.
        httpx.TransportError: it went away.
    """

    async def ask(client: Client) -> list[tuple[int, ...]]:
        return await asyncio.gather(*(client.token_ids(p, output_tokens) for p in prompts))

    return run_with_client(url, ask)


async def _pieces(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What has been generated so far, each time that there is more of it."""
    async for line in response.aiter_lines():
        name, _, data = line.partition(":")
        if name != "data" or data.strip() == "[DONE]":  # a comment's has no name
            continue
        piece = json.loads(data)
        if "error" in piece:
            raise ServerError(f"a stream ended with {piece['error']}")
        yield piece


def _check(response: httpx.Response) -> None:
    if response.is_error:
        raise ServerError(f"{response.url.path}: {response.status_code} {response.text[:300]}")


def _greedy(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def _body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {**_greedy(prompt, tokens), "return_logprob": True}


def _given_up(prompt: Sequence[int], tokens: int, last: dict[str, Any] | None) -> Answer:
    """The answer so far. Given up in the middle if it had begun and had not ended."""
    got = _output(last)
    return Answer(tuple(prompt), tokens, got, aborted=0 < len(got.token_ids) < tokens)


def _ids(piece: dict[str, Any] | None) -> list[int]:
    return [] if piece is None else piece["output_ids"]


def _output(answer: dict[str, Any] | None) -> Output:
    if answer is None:
        return Output((), ())
    entries = answer["meta_info"]["output_token_logprobs"]
    return Output(tuple(answer["output_ids"]), tuple(map(_logprob, entries)))


def _logprob(entry: Sequence[Any]) -> float:
    """JSON has no NaN: SGLang writes null for it."""
    return math.nan if entry[0] is None else float(entry[0])
