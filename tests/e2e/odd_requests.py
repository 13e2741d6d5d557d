"""Parameters and fields that would end a step, and with it the server."""

from __future__ import annotations

import math
from typing import Any

ODD: list[dict[str, Any]] = [
    {"json_schema": {"type": "object"}}, {"regex": ["a"]}, {"max_new_tokens": 16.0},
    {"logit_bias": {"5": "x"}}, {"logit_bias": []}, {"logit_bias": {"5": math.nan}},
    {"logit_bias": {"5": 1e39}}, {"stream_interval": "5"}, {"temperature": "hot"},
    {"temperature": 0, "is_normalized": True}, {"top_k": 2**31}, {"sampling_seed": 2**63},
    {"repetition_penalty": 1e-38, "temperature": 1.0}, {"ignore_eos": 1}, {"stop": [7]},
]  # fmt: skip
ODD_FIELDS: list[dict[str, Any]] = [
    {"lora_id": ["y"]}, {"return_logprob": True, "logprob_start_len": [0]}, {"rid": ""},
    {"return_logprob": True, "top_logprobs_num": [2]}, {"logprob_start_len": [0]},
]  # fmt: skip
