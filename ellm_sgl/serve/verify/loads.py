"""What the servers are asked: prompts at once, chats of several turns, streams that are given up.

A load asks for the same at every server it is sent to, except that stock SGLang, the reference,
answers all streams to their end. Each has

- `most_tokens`: KV that it needs if all its requests are there at once, what they share counted
  once; tokens;
- `most_requests`: that are there at once;
- `answers(client, whole)`: the answers, always in the same order. `whole`: give no stream up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ellm_sgl.client.generate import Answer, Client
from ellm_sgl.client.process import has_tokenizer

TEXTS = ((0, 20), (7, 150), (40, 600))
"""(start, tokens) of prompts of English text."""
CHATS, TURNS = 10, 3
MOST_PREFIX_TOKENS = 320
MOST_TURN_TOKENS = 144
"""Of a chat's turn: question and answer."""
STAGGER_S = 0.04
"""Between one chat's arrival and the next one's."""
STREAMS = 12
"""Of `Aborts`."""
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class AtOnce:
    """All prompts at once."""

    prompts: Sequence[Prompt]
    output_tokens: int

    @property
    def most_tokens(self) -> int:
        return sum(len(p) + self.output_tokens for p in self.prompts)

    @property
    def most_requests(self) -> int:
        return len(self.prompts)

    async def answers(self, client: Client, whole: bool) -> list[Answer]:
        return await asyncio.gather(*(client.complete(p, self.output_tokens) for p in self.prompts))


@dataclass(frozen=True)
class Chats:
    """Chats of several turns that begin one after the other with the same long prefix; two and two
    have the first question in common as well. A turn's prompt holds the answers before it."""

    prefix: Prompt
    questions: Sequence[Sequence[Prompt]]
    """`[chat][turn]`."""
    output_tokens: int

    @classmethod
    def up_to(cls, longest: int, vocabulary: int, rng: random.Random) -> Self:
        """Chats of at most `longest` tokens each."""
        prefix = min(MOST_PREFIX_TOKENS, 2 * longest // 5)
        turn = min(MOST_TURN_TOKENS, (longest - prefix) // TURNS)
        output = max(turn // 3, 1)

        def question() -> Prompt:
            return _random_tokens(
                rng.randint(1 + (turn - output) // 4, turn - output), vocabulary, rng
            )

        questions = [[question() for _ in range(TURNS)] for _ in range(CHATS)]
        for i in range(1, CHATS, 2):
            questions[i][0] = questions[i - 1][0]
        return cls(_random_tokens(prefix, vocabulary, rng), questions, output)

    @property
    def most_tokens(self) -> int:
        asked = sum(len(q) + self.output_tokens for chat in self.questions for q in chat)
        return len(self.prefix) + asked

    @property
    def most_requests(self) -> int:
        return len(self.questions)

    async def answers(self, client: Client, whole: bool) -> list[Answer]:
        async def chat(number: int, questions: Sequence[Prompt]) -> list[Answer]:
            await asyncio.sleep(number * STAGGER_S)
            history, turns = self.prefix, []
            for question in questions:
                turns.append(await client.complete(history + question, self.output_tokens))
                history = (*history, *question, *turns[-1].output.token_ids)
            return turns

        chats = await asyncio.gather(*(chat(i, q) for i, q in enumerate(self.questions)))
        return [answer for turns in chats for answer in turns]


@dataclass(frozen=True)
class Aborts:
    """Streams that share a prefix, the second, fourth, ... of which are given up in the middle: the
    connection is closed after some tokens, or while the request is paused; or the server is asked
    to abort it."""

    prefix: Prompt
    tails: Sequence[Prompt]
    output_tokens: int

    @classmethod
    def up_to(cls, longest: int, vocabulary: int, rng: random.Random) -> Self:
        """Requests of at most `longest` tokens each."""
        prefix = min(MOST_PREFIX_TOKENS, 2 * longest // 5)
        rest = min(2 * MOST_TURN_TOKENS, longest - prefix)
        output = 2 * rest // 3
        lengths = [rng.randint(1, rest - output) for _ in range(STREAMS)]
        tails = [_random_tokens(n, vocabulary, rng) for n in lengths]
        return cls(_random_tokens(prefix, vocabulary, rng), tails, output)

    @property
    def most_tokens(self) -> int:
        return len(self.prefix) + sum(len(t) + self.output_tokens for t in self.tails)

    @property
    def most_requests(self) -> int:
        return len(self.tails)

    async def answers(self, client: Client, whole: bool) -> list[Answer]:
        async def one(number: int, tail: Prompt) -> Answer:
            await asyncio.sleep(number * STAGGER_S)
            prompt = self.prefix + tail
            kind, after = number % 6, 1 + number
            if whole or kind % 2 == 0:
                return await client.complete(prompt, self.output_tokens)
            if kind == 5:
                return await client.abort(prompt, self.output_tokens, after)
            return await client.drop(prompt, self.output_tokens, after, when_stalled=kind == 3)

        return await asyncio.gather(*(one(i, p) for i, p in enumerate(self.tails)))


Load = AtOnce | Chats | Aborts


def make_prompts(
    model_path: str, vocabulary: int, lengths: Sequence[int], seed: int
) -> list[Prompt]:
    """Token ids: a random prompt of each length, and English text, no longer than these, where
    there is a tokenizer."""
    rng = random.Random(seed)
    prompts = [_random_tokens(n, vocabulary, rng) for n in lengths]
    if has_tokenizer(model_path):
        from ellm_sgl.sglang.platform.torchvision_ops import declare

        declare()
        from transformers import AutoTokenizer

        text = AutoTokenizer.from_pretrained(model_path).encode(str(Path.__doc__) * 20)
        prompts += [tuple(text[start : start + n]) for start, n in TEXTS if n <= max(lengths)]
    return prompts


def _random_tokens(count: int, vocabulary: int, rng: random.Random) -> Prompt:
    return tuple(rng.randrange(3, vocabulary) for _ in range(count))
