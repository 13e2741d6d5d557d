"""Sampling parameters that would end a step of everybody's are refused, wherever they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.sampling import check_sampling

declare()

from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402  after declare()

FINE: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 1, "max_new_tokens": None, "n": 2, "ignore_eos": True},
    {"stop": "x", "stop_regex": ["a+"], "stop_token_ids": [None, "7"], "min_p": 0.1},
    {"stop": ["x", "y"], "json_schema": "{}", "logit_bias": {"5": -100, "6": 0.5}, "top_k": -1},
    {"custom_params": {"deep": [{"er": 1}]}, "stream_interval": 4, "sampling_seed": 2**40},
]


@pytest.mark.parametrize("params", FINE, ids=str)
def test_what_sglang_takes_is_taken(params: dict[str, Any]) -> None:
    check_sampling(params, SamplingParams)
    check_sampling(SamplingParams(**params), SamplingParams)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("json_schema", {"type": "object"}, "Expected `str | null`, got `object`"),
        ("regex", ["a"], "Expected `str | null`, got `array`"),
        ("max_new_tokens", 16.0, "Expected `int | null`, got `float`"),
        ("ignore_eos", 1, "Expected `bool`, got `int`"),
        ("logit_bias", {"5": "x"}, "Expected `float`, got `str`"),
        ("logit_bias", {"5": math.nan}, "nan for '5'; give a finite number, of 1e+20 at most"),
        ("logit_bias", {"5": -1e39}, "give a finite number"),
        ("top_k", 2**31, "give less than 2147483648"),
        ("sampling_seed", -(2**70), "give less than"),
        ("temperature", math.inf, "give a finite number"),
        ("repetition_penalty", 1e-38, "give 1e-06 or more"),
    ],
)
def test_what_would_end_a_step_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^sampling_params: {name}: ") as refused:
        check_sampling({name: value}, SamplingParams)
    assert said in str(refused.value)
    params = SamplingParams()
    setattr(params, name, value)  # of a process without the first look
    with pytest.raises(ValueError, match=f"^sampling_params: {name}: "):
        check_sampling(params, SamplingParams)


def test_what_sglang_fills_in_itself_is_nobodys() -> None:
    with pytest.raises(ValueError, match="there is no is_normalized; leave it out"):
        check_sampling({"temperature": 0, "is_normalized": True}, SamplingParams)
    normal = SamplingParams()
    normal.normalize(None)
    assert normal.is_normalized
    check_sampling(normal, SamplingParams)
