"""Prefill and decode rates of prompts that are sent at once, and what the machine would allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ellm_sgl.client.replay import Outcome
from ellm_sgl.eval.bench.peers.llama_cpp import Generated
from ellm_sgl.eval.bench.result import MeasurementError
from ellm_sgl.latency import ModelShape


@dataclass(frozen=True)
class Rates:
    """Tokens per second."""

    prefill: float
    """Of the prompts, until the last of them has its first token."""
    decode: float
    """Of the answers, while all are decoded together."""

    @staticmethod
    def of_outcomes(outcomes: Sequence[Outcome]) -> Rates:
        """Of a server that streams.

        Raises:
            MeasurementError: a request was not served, or all were never decoded together.
        """
        for outcome in outcomes:
            if not outcome.complete:
                raise MeasurementError(f"a request ended otherwise: {outcome.finish}")
        first = max(o.token_s[0] for o in outcomes)
        last = min(o.token_s[-1] for o in outcomes)
        made = sum(first < at <= last for o in outcomes for at in o.token_s)
        if not made:
            raise MeasurementError("the first answer was over before the last began: ask for more")
        prompts = sum(len(o.request.prompt) for o in outcomes)
        sent = min(o.sent_s for o in outcomes)
        return Rates(prompts / (first - sent), made / (last - first))

    @staticmethod
    def of_generated(prompts: Sequence[Sequence[int]], found: Generated) -> Rates:
        """Of llama.cpp."""
        made = sum(len(output) - 1 for output in found.outputs)
        return Rates(sum(map(len, prompts)) / found.prefill_s, made / found.decode_s)


@dataclass(frozen=True)
class Work:
    """What a model reads and multiplies for some requests of one length."""

    decode_bytes: float
    """Of a decode step: weights once, KV of each request."""
    prefill_flops: float
    """Of all prompts."""

    @staticmethod
    def of(shape: ModelShape, requests: int, prompt: int, output: int, element: int) -> Work:
        """
        Args:
            output: tokens of each answer; a step is the mean one.
            element: bytes of a weight, and of an element of the KV.
        """
        of_layers = shape.layers * (shape.attention_weights + shape.expert_weights)
        head = shape.hidden * shape.vocabulary
        kv = shape.in_elements_of(element).kv_bytes_per_token
        attention = 2 * shape.layers * shape.heads * shape.head_dim * prompt * prompt
        return Work(
            decode_bytes=(of_layers + head) * element + requests * (prompt + output / 2) * kv,
            prefill_flops=requests * (2 * of_layers * prompt + 2 * head + attention),
        )
