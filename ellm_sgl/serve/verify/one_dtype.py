"""Starts the servers of one dtype, one at a time, and compares what they answer."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import torch

from ellm_sgl.client.generate import Answer, Client, run_with_client
from ellm_sgl.client.process import ServerError, ServerProcess
from ellm_sgl.config import ENV
from ellm_sgl.config.commands import progress_lines
from ellm_sgl.kernels.experimental.flashinfer import attention as flashinfer
from ellm_sgl.latency import ModelShape
from ellm_sgl.serve.verify.comparing import compare
from ellm_sgl.serve.verify.figures import Comparison, Expected
from ellm_sgl.serve.verify.loads import Load
from ellm_sgl.serve.verify.rounding import EXACT, Spread
from ellm_sgl.serve.verify.setting import Setting, Stage
from ellm_sgl.serve.verify.stages import POOL_TOKENS
from ellm_sgl.sglang import cuda

T = TypeVar("T")
FEW_ROWS = 64
"""Of a prompt that stock SGLang computes at once, to tell how large rounding is: about what a span
has that a step recomputes. Products of few rows sum in another order than those of many, and so
does all KV that they give; a prompt in one chunk has none of it."""


@dataclass(frozen=True)
class Run:
    """What a server answered in one setting."""

    setting: Setting
    answers: Sequence[Answer]
    """Of the load, once or, where it ran again, again and again."""
    resizes: Mapping[str, int]
    """Of the pool meanwhile: outcomes, and how many had each."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    """The server's state around the load,"""
    idle: Mapping[str, Any]
    """and with an empty prefix cache."""


@dataclass(frozen=True)
class OneDtype:
    """The settings of one dtype, and the reference that they are compared with.

    The reference runs last: it also scores what the settings have answered, and only one server at
    a time has to fit into memory.
    """

    model_path: str
    dtype: str
    model: ModelShape
    loads: Mapping[str, Load]
    block_tokens: int

    def compared(self, stages: Iterable[Stage]) -> list[Comparison]:
        """Run every setting of every stage, and compare it with stock SGLang.

        Raises:
            ServerError: a server did not start, refused a request or went away.
        """
        return self._judged(list(self._runs(stages)))

    def _runs(self, stages: Iterable[Stage]) -> Iterator[Run]:
        for stage in stages:
            if not stage.store:
                yield from self._served(stage, stage.settings)
                continue
            with TemporaryDirectory(prefix="ellm-sgl-") as folder:
                for setting in stage.settings:
                    yield from self._served(stage, [setting], "--ellm-kv-store", folder)

    def _served(self, stage: Stage, settings: Sequence[Setting], *more: str) -> Iterator[Run]:
        """On one server."""
        block = ("--ellm-block-tokens", str(self.block_tokens))
        arguments = [*self._model(), *block, *stage.arguments, *more]
        with ServerProcess(arguments, stage.environment) as server:
            for setting in settings:
                progress_lines(f"{self.dtype}: eLLM, {setting.name}")
                yield self._run(server, setting)

    def _judged(self, runs: Sequence[Run]) -> list[Comparison]:
        """Compare every run with stock SGLang, which has everything cached."""
        names = list(dict.fromkeys(run.setting.load for run in runs))
        in_parts: dict[str, list[Answer]] = {}
        if self.dtype != EXACT:
            with self._stock("--chunked-prefill-size", str(FEW_ROWS)) as server:
                in_parts = self._references(server, names, f"chunks of {FEW_ROWS}")
        with self._stock() as server:
            references = self._references(server, names, "everything cached")
            # What is scored shares no KV with what was answered.
            server.flush_cache()
            noise = {name: self._forced(server, references[name], name) for name in names}
            for name, answers in in_parts.items():
                noise[name] = Spread.larger(noise[name], self._forced(server, answers, name))
            forced = [self._forced(server, run.answers, run.setting.name) for run in runs]
        return [
            self._comparison(run, references[run.setting.load], found, noise[run.setting.load])
            for run, found in zip(runs, forced, strict=True)
        ]

    @contextmanager
    def _stock(self, *more: str) -> Iterator[ServerProcess]:
        arguments = [*self._model(), "--max-total-tokens", str(2 * POOL_TOKENS), *more]
        with ServerProcess([*arguments, *_reference_on_cuda(self.model.head_dim)]) as server:
            _must_be_stock(server)
            yield server

    def _references(
        self, server: ServerProcess, names: Iterable[str], how: str
    ) -> dict[str, list[Answer]]:
        """What it answers to each of the loads."""
        answers = {}
        for name in names:
            progress_lines(f"{self.dtype}: stock SGLang, {how}, {name}")
            answer = partial(self.loads[name].answers, whole=True)
            answers[name] = self._with_client(server, name, answer)
        return answers

    def _model(self) -> list[str]:
        return ["--model-path", self.model_path, "--dtype", self.dtype, "--skip-tokenizer-init"]

    def _run(self, server: ServerProcess, setting: Setting) -> Run:
        if setting.device_tokens is not None:
            server.adjust(ellm_device_kv_tokens=setting.device_tokens)
        if setting.policy is not None:
            name, options = setting.policy
            server.switch_policy(name, **options)
        server.flush_cache()
        before = server.state()
        answers, resizes = self._ask(server, setting, before["resize"])
        after = server.state()
        server.flush_cache()
        return Run(setting, answers, resizes, before, after, server.state())

    def _ask(
        self, server: ServerProcess, setting: Setting, pool: Mapping[str, int]
    ) -> tuple[list[Answer], Mapping[str, int]]:
        """The answers, and what became of resizes; `pool` is what the state says of its size."""
        load = self.loads[setting.load]

        async def work(client: Client) -> tuple[list[Answer], Mapping[str, int]]:
            if setting.resizes:
                most = setting.device_tokens or pool["most_tokens"]
                sizes = self._random_sizes(setting, most)
                async with client.resizing(sizes, pool["wanted_tokens"]) as resizes:
                    answers: list[Answer] = []
                    while not answers or (resizes.left and not resizes.failed()):
                        answers += await load.answers(client, whole=False)
                return answers, resizes.outcomes
            if setting.swing is None:
                return await load.answers(client, whole=False), {}
            async with client.swinging(*setting.swing):
                return await load.answers(client, whole=False), {}

        return self._with_client(server, setting.name, work)

    def _random_sizes(self, setting: Setting, most: int) -> list[int]:
        """Tokens: as often small as large, and never less than a block for each request."""
        least = min((self.loads[setting.load].most_requests + 2) * self.block_tokens, most)
        rng = random.Random(setting.name)
        return [int(least * (most / least) ** rng.random()) for _ in range(setting.resizes)]

    def _forced(self, server: ServerProcess, answers: Sequence[Answer], what: str) -> Spread | None:
        """How far log-probabilities are from those of the same tokens one answer at a time, with
        everything cached; None in fp32, where tokens are compared."""
        if self.dtype == EXACT:
            return None

        async def score(client: Client) -> list[tuple[float, ...]]:
            return [await client.score(answer, self.model.vocabulary) for answer in answers]

        return Spread.of([a.output for a in answers], self._with_client(server, what, score))

    def _with_client(
        self, server: ServerProcess, what: str, work: Callable[[Client], Awaitable[T]]
    ) -> T:
        try:
            return run_with_client(server.url, work)
        except ServerError as error:
            raise ServerError(f"{self.dtype}, {what}: {error}") from None
        except httpx.TransportError as error:
            raise ServerError(f"{self.dtype}, {what}: {server.lost(error)}") from error

    def _comparison(
        self, run: Run, reference: Sequence[Answer], forced: Spread | None, noise: Spread | None
    ) -> Comparison:
        setting = run.setting
        reference = list(reference) * (len(run.answers) // max(len(reference), 1) or 1)
        expected = Expected(
            asked=[a.asked for a in reference],
            aborted=[a.aborted for a in run.answers],
            needs=setting.needs,
            resizes=run.resizes,
            most_tokens=max(len(a.prompt) + a.asked for a in reference),
            forced=forced,
            noise=noise,
            idle=run.idle,
        )
        outputs, wanted = ([a.output for a in answers] for answers in (run.answers, reference))
        return compare(self.dtype, setting.name, wanted, outputs, run.before, run.after, expected)


def _reference_on_cuda(head_dim: int) -> tuple[str, ...]:
    """Which of stock SGLang's backends to compare with on a CUDA device: the one whose kernels eLLM
    calls, too. In 16 bits other kernels round otherwise, farther than two batch sizes of one kernel
    do (docs/gpu.md)."""
    if not cuda.available():
        return ()
    theirs = flashinfer.supports(head_dim, torch.bfloat16, torch.bfloat16)
    return "--attention-backend", "flashinfer" if theirs else "torch_native"


def _must_be_stock(server: ServerProcess) -> None:
    """Raise ServerError if eLLM is on in the reference, as it is where the environment says so."""
    answer = httpx.get(f"{server.url}/ellm/state", timeout=60, trust_env=False)
    if answer.status_code != httpx.codes.NOT_FOUND:
        raise ServerError(f"the reference is not stock SGLang: unset {ENV}")
