"""What `ellm-sgl verify` asks of a server, and how it reads the answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from ellm_sgl.client.generate import Answer, Client, Output
from ellm_sgl.client.process import ServerError
from ellm_sgl.serve.verify.loads import CHATS, TURNS, Aborts, Chats
from ellm_sgl.sglang.keep_alive import COMMENT

TOKENS = 24
"""Of each answer that the server below gives."""


class Server:
    """Answers as SGLang's `/generate` does: token i is the prompt's length + i. A stream goes on
    until it is aborted."""

    def __init__(self, stalls_at: int | None = None) -> None:
        self.aborted: set[str] = set()
        self.stalls_at = stalls_at

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/abort_request":
            self.aborted.add(body["rid"])
            return httpx.Response(200)
        assert request.url.path == "/generate" and body["sampling_params"]["temperature"] == 0
        count = body["sampling_params"]["max_new_tokens"]
        if body.get("stream"):
            return httpx.Response(200, stream=Stream(self, len(body["input_ids"]), count))
        return httpx.Response(200, json=piece(len(body["input_ids"]), count))


class Stream(httpx.AsyncByteStream):
    def __init__(self, server: Server, prompt: int, count: int) -> None:
        self.server, self.prompt, self.count = server, prompt, count

    async def __aiter__(self) -> Any:
        yield COMMENT  # as of a stream that waits for long
        for sent in range(1, self.count + 1):
            await asyncio.sleep(0 if sent != self.server.stalls_at else 3600)
            ended = "abort" if "r" in self.server.aborted else "length"
            over = sent == self.count or ended == "abort"
            answer = piece(self.prompt, sent, ended if over else None)
            yield f"data: {json.dumps(answer)}\n\n".encode()
            if over:
                break
        yield b"data: [DONE]\n\n"


def piece(prompt: int, count: int, reason: str | None = None) -> dict[str, Any]:
    ids = [prompt + i for i in range(count)]
    finish = None if reason is None else {"type": reason}
    logprobs = [[-0.5, i, None] for i in ids]
    meta = {"id": "r", "output_token_logprobs": logprobs, "finish_reason": finish}
    return {"output_ids": ids, "meta_info": meta}


Handler = Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]


def asked(handler: Handler, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as http:
            return await work(Client("http://server", http))

    return asyncio.run(run())


def answering(**changes: Any) -> Handler:
    async def handler(_: httpx.Request) -> httpx.Response:
        answer = piece(3, 4)
        answer["meta_info"] |= changes
        return httpx.Response(200, json=answer)

    return handler


def chats_of(longest: int) -> Iterator[Chats | Aborts]:
    for kind in (Chats, Aborts):
        yield kind.up_to(longest, 512, random.Random(longest))


@pytest.mark.parametrize("longest", [64, 65, 100, 333, 516, 1516, 9000])
def test_no_request_is_longer_than_the_model_was_said_to_take(longest: int) -> None:
    for load in chats_of(longest):
        answers: Sequence[Answer] = asked(Server(), partial(load.answers, whole=True))
        for answer in answers:
            assert len(answer.output.token_ids) == answer.asked >= 1
            assert len(answer.prompt) + answer.asked <= longest
        prefix = load.prefix
        assert len(prefix) >= 16 and all(a.prompt[: len(prefix)] == prefix for a in answers)
        distinct = {a.prompt[: i + 1] for a in answers for i in range(len(a.prompt))}
        assert len(distinct) <= load.most_tokens


def test_a_turn_of_a_chat_goes_on_from_the_answers_before_it() -> None:
    chats = Chats.up_to(1000, 512, random.Random(1))
    answers: Sequence[Answer] = asked(Server(), lambda c: chats.answers(c, whole=False))
    assert len(answers) == CHATS * TURNS
    for chat in range(CHATS):
        first, second, _ = answers[chat * TURNS : (chat + 1) * TURNS]
        history = (*first.prompt, *first.output.token_ids)
        assert second.prompt == (*history, *chats.questions[chat][1])
    for even in range(0, CHATS, 2):
        one, other = (answers[i * TURNS].prompt for i in (even, even + 1))
        assert one == other
        assert answers[even * TURNS + 1].prompt != answers[(even + 1) * TURNS + 1].prompt


def test_half_of_the_streams_are_given_up_but_at_the_reference_none() -> None:
    load = Aborts.up_to(600, 512, random.Random(1))
    streams: Sequence[Answer] = asked(Server(stalls_at=14), lambda c: load.answers(c, whole=False))
    whole: Sequence[Answer] = asked(Server(), lambda c: load.answers(c, whole=True))
    assert [a.aborted for a in streams] == [i % 2 == 1 for i in range(len(load.tails))]
    assert not any(a.aborted for a in whole)
    for given_up, complete in zip(streams, whole, strict=True):
        assert given_up.prompt == complete.prompt and given_up.asked == complete.asked
        got = given_up.output.token_ids
        assert got == complete.output.token_ids[: len(got)]
        assert given_up.aborted == (0 < len(got) < given_up.asked)


def test_a_stream_is_dropped_while_it_stalls() -> None:
    answer: Answer = asked(Server(stalls_at=7), lambda c: c.drop((1, 2), TOKENS, 3, True))
    assert answer.aborted and len(answer.output.token_ids) == 6


def test_a_stream_that_never_stalls_is_dropped_half_way() -> None:
    answer: Answer = asked(Server(), lambda c: c.drop((1, 2), TOKENS, 3, True))
    assert answer.aborted and len(answer.output.token_ids) == TOKENS // 2


def test_a_stream_that_the_server_completes_was_not_aborted() -> None:
    class Deaf(Server):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            response = await super().__call__(request)
            self.aborted.clear()
            return response

    answer: Answer = asked(Deaf(), lambda c: c.abort((1, 2), TOKENS, 3))
    assert not answer.aborted and len(answer.output.token_ids) == TOKENS
    heard: Answer = asked(Server(), lambda c: c.abort((1, 2), TOKENS, 3))
    assert heard.aborted and 3 <= len(heard.output.token_ids) < TOKENS


def test_null_is_no_number() -> None:
    logprobs = [[None, 3, None], [-0.5, 4, None]]
    handler = answering(output_token_logprobs=logprobs)
    answer: Answer = asked(handler, lambda c: c.complete((1, 2, 3), 4))
    first, second = answer.output.logprobs
    assert math.isnan(first) and second == -0.5


def test_given_tokens_are_scored_as_a_prompt() -> None:
    scored = [[None, 2, None], [-1.0, 3, None], [-2.0, 4, None]]
    bodies: list[dict[str, Any]] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return await answering(input_token_logprobs=scored)(request)

    answer: Answer = asked(answering(), lambda c: c.complete((1, 2), 2))
    output = type(answer.output)((3, 4), (-1.0, -2.0))
    answer = Answer((1, 2), 2, output)
    assert asked(handler, lambda c: c.score(answer, 100)) == (-1.0, -2.0)
    assert bodies[0]["input_ids"] == [1, 2, 3, 4] and bodies[0]["logprob_start_len"] == 1
    other = Answer((1, 2), 2, type(output)((3, 5), (-1.0, -2.0)))
    with pytest.raises(ServerError, match=r"tokens \[3, 4\] were scored, not \[3, 5\]"):
        asked(handler, lambda c: c.score(other, 100))


def test_the_last_token_of_the_vocabulary_is_scored_under_the_name_that_sglang_gives_it() -> None:
    handler = answering(input_token_logprobs=[[None, 2, None], [-1.0, 0, None], [-2.0, 4, None]])
    output = Output((9, 4), (-1.0, -2.0))
    answer = Answer((1, 2), 2, output)
    assert asked(handler, lambda c: c.score(answer, 10)) == (-1.0, -2.0)
    with pytest.raises(ServerError, match=r"tokens \[0, 4\] were scored, not \[9, 4\]"):
        asked(handler, lambda c: c.score(answer, 11))


def test_a_refusal_names_status_and_reason() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(500, text="out of memory")

    for work in (lambda c: c.complete((1,), 2), lambda c: c.drop((1,), 2, 1, False)):
        with pytest.raises(ServerError, match="/generate: 500 out of memory"):
            asked(handler, work)


def test_an_error_in_a_stream_is_told() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b'data: {"error": {"message": "gone"}}\n\n')

    with pytest.raises(ServerError, match="gone"):
        asked(handler, lambda c: c.abort((1,), 9, 1))
