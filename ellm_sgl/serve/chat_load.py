"""The demo's load: chats about Python, streamed at once through the OpenAI client; what it saw."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pydoc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
import openai
from openai.types.chat import ChatCompletionMessageParam

TOPICS = (
    "str.split", "str.replace", "list.sort", "int.to_bytes", "sorted", "filter",
    "str.join", "dict.update", "isinstance", "enumerate", "bytes.find", "eval",
    "print", "open", "max", "map", "str.format", "dict.pop",
    "iter", "range", "str.strip", "sum", "getattr", "str.partition",
)  # fmt: skip
"""What the chats are about, one each: the demo model has read Python's documentation."""

ROLE_TOKENS = 8
"""Role marks and line ends of question, answer and second question; a letter is a token too."""


@dataclass(frozen=True)
class ChatLoad:
    """Chats that all begin at once.

    A request says how long its answer may be, not how long it will be: SGLang has to guess how
    much memory it is going to need, as it does for every chat.
    """

    streams: int = len(TOPICS)
    output_tokens: int = 256
    """At most."""
    prompt_tokens: int = 128
    """About: the prompt ends with a whole word."""

    @property
    def most_tokens(self) -> int:
        """Tokens of KV if every answer is as long as it may be."""
        return self.streams * (self.prompt_tokens + self.output_tokens)

    def begin(self) -> list[ChatStream]:
        """The chats, not sent yet."""
        return [ChatStream(topic) for topic in TOPICS[: self.streams]]

    def messages(self, topic: str) -> list[ChatCompletionMessageParam]:
        """A question, the first words of Python's own answer, and the wish to hear more."""
        question, wish = f"What does {topic} do?", "Go on."
        documentation = " ".join((inspect.getdoc(pydoc.locate(f"builtins.{topic}")) or "").split())
        room = self.prompt_tokens - ROLE_TOKENS - len(question) - len(wish)
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": documentation[:room].rsplit(" ", 1)[0]},
            {"role": "user", "content": wish},
        ]


@dataclass
class ChatStream:
    """One chat, filled in while it is streamed. Times are monotonic, in seconds."""

    topic: str
    text: str = ""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When each piece of text arrived; a piece is one token, or some that came together."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; known at the end."""
    finish: str | None = None
    """The server's finish reason, or the error that ended the chat; None while it goes on."""

    @property
    def complete(self) -> bool:
        """Whether the answer ended as it should."""
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def longest_pause_s(self) -> float | None:
        """Longest wait for the next token of a stream that had begun."""
        return max((b - a for a, b in itertools.pairwise(self.arrivals_s)), default=None)

    def same_output(self, other: ChatStream) -> bool:
        """Whether both hold the same answer. The demo model's tokens are bytes, so equal texts
        of equally many tokens are equal tokens."""
        ours, theirs = ((s.text, s.output_tokens, s.finish) for s in (self, other))
        return ours == theirs


@dataclass(frozen=True)
class LoadStatistics:
    """A load as its clients saw it; None where no stream got far enough to tell."""

    seconds: float
    """From the first request to the last token."""
    output_tokens: int
    output_tokens_per_s: float
    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tpot_mean_ms: float | None
    tpot_p99_ms: float | None
    longest_pause_s: float | None

    @classmethod
    def of(cls, streams: Sequence[ChatStream]) -> LoadStatistics:
        begin = min(s.sent_s for s in streams)
        end = max((s.arrivals_s[-1] for s in streams if s.arrivals_s), default=begin)
        tokens = sum(s.output_tokens for s in streams)
        ttft_mean, ttft_p99, _ = _mean_p99_max(s.ttft_s for s in streams)
        tpot_mean, tpot_p99, _ = _mean_p99_max(s.tpot_s and 1e3 * s.tpot_s for s in streams)
        _, _, longest_pause = _mean_p99_max(s.longest_pause_s for s in streams)
        return cls(
            seconds=end - begin,
            output_tokens=tokens,
            output_tokens_per_s=tokens / (end - begin) if end > begin else 0.0,
            ttft_mean_s=ttft_mean,
            ttft_p99_s=ttft_p99,
            tpot_mean_ms=tpot_mean,
            tpot_p99_ms=tpot_p99,
            longest_pause_s=longest_pause,
        )


def _mean_p99_max(
    values: Iterable[float | None],
) -> tuple[float, float, float] | tuple[None, None, None]:
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return None, None, None
    return float(known.mean()), float(np.percentile(known, 99)), float(known.max())


async def stream_all(url: str, load: ChatLoad, streams: Sequence[ChatStream]) -> None:
    """Send the chats of `load` to the server at `url` at once, and fill in `streams` (from
    `load.begin()`) until all have ended."""
    direct = openai.DefaultAsyncHttpxClient(trust_env=False)  # whatever proxy the user has set
    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=direct
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for seed, stream in enumerate(streams):
            group.create_task(_stream(client, load, stream, seed))


async def _stream(
    client: openai.AsyncOpenAI, load: ChatLoad, stream: ChatStream, seed: int
) -> None:
    stream.sent_s = time.monotonic()
    try:
        chunks = await client.chat.completions.create(
            model="demo",
            messages=load.messages(stream.topic),
            temperature=0,
            seed=seed,
            max_tokens=load.output_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            if chunk.usage:
                stream.prompt_tokens = chunk.usage.prompt_tokens
                stream.output_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    stream.text += choice.delta.content
                    stream.arrivals_s.append(time.monotonic())
                stream.finish = choice.finish_reason or stream.finish
    except (openai.APIError, httpx.HTTPError) as error:  # the latter when a stream breaks off
        stream.finish = f"{type(error).__name__}: {error}"
    stream.finish = stream.finish or "cut off"
