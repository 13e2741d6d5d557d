"""The demo's load: chats about Python, streamed at once through the OpenAI client."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

from ellm_sgl.serve.stream import ChatStream

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
