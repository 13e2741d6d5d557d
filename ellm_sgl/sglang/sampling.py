"""Sampling parameters that a step can take: one builds tensors of those of all its requests, and
what it cannot take of one ends SGLang's scheduler, with the requests of everybody."""

from __future__ import annotations

import functools
import math
from typing import Any

from ellm_sgl.config.ranges import shown

_INTERNAL = frozenset(
    ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
)
"""Fields that SGLang fills in itself."""
_LOOKED_AT_ELSEWHERE = frozenset(("custom_params", "stop_token_ids"))
"""Fields of which SGLang takes other types, too, than it says."""
_INT32, _INT64 = 2**31, 2**63
"""Whole numbers of a step's tensors are less, in amount: `top_k`, and the others."""
_MOST_BIAS = 1e20
"""Of a logit, in amount;"""
_LEAST_REPETITION = 1e-6
"""and of the penalty that it is divided by: a temperature may still divide it by as much."""


def check_sampling(params: Any, kind: Any) -> None:
    """Raise ValueError for values of another type than the field's, and for numbers that float32,
    or the whole numbers of a step's tensors, cannot hold.

    Args:
        params: as a client sends them, an object; or as SGLang's scheduler has them.
        kind: SGLang's class of them.
    """
    import msgspec

    sent = isinstance(params, dict)
    for name, of_type in _fields(kind):
        value = params.get(name) if sent else getattr(params, name)
        if name in _INTERNAL:
            if sent and name in params:
                raise ValueError(f"sampling_params: there is no {name}; leave it out")
            continue
        if value is None or name in _LOOKED_AT_ELSEWHERE:
            continue
        try:
            msgspec.convert(value, of_type)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {name}: {shown(value)}: {error}") from None
        _check_number(name, value)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Names and types: looked up once, not for each request."""
    import msgspec

    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def _check_number(name: str, value: Any) -> None:
    most = _INT32 if name == "top_k" else _INT64
    if isinstance(value, int) and abs(value) >= most:
        raise ValueError(f"sampling_params: {name}: {shown(value)}; give less than {most}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"sampling_params: {name}: {shown(value)}; give a finite number")
    if name == "repetition_penalty" and 0 < value < _LEAST_REPETITION:
        raise ValueError(
            f"sampling_params: {name}: {shown(value)}; give {_LEAST_REPETITION:g} or more"
        )
    if name == "logit_bias":
        for token_id, bias in value.items():
            if not abs(bias) <= _MOST_BIAS:
                raise ValueError(
                    f"sampling_params: {name}: {shown(bias)} for {shown(token_id)}; give a finite "
                    f"number, of {_MOST_BIAS:g} at most"
                )
