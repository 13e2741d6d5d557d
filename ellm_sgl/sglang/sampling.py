"""Sampling parameters that a step can take: one builds tensors of those of all its requests, and
what it cannot take of one ends SGLang's scheduler, with the requests of everybody."""

from __future__ import annotations

import math
from typing import Any

from ellm_sgl.config.ranges import shown

_INTERNAL = frozenset(
    ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
)
"""Fields that SGLang fills in itself."""
_LOOKED_AT_ELSEWHERE = frozenset(("custom_params", "stop_token_ids"))
"""Fields of which SGLang takes other types, too, than it says."""
_WHOLE = {"top_k": 2**31}
"""Whole numbers are less than this, in amount, by field;"""
_WHOLE_NUMBER = 2**63
"""or than this."""
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
    for field in msgspec.structs.fields(kind):
        name = field.name
        value = params.get(name) if sent else getattr(params, name)
        if name in _INTERNAL:
            if sent and name in params:
                raise ValueError(f"sampling_params: there is no {name}; leave it out")
            continue
        if value is None or name in _LOOKED_AT_ELSEWHERE:
            continue
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {name}: {shown(value)}: {error}") from None
        _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, int) and abs(value) >= (most := _WHOLE.get(name, _WHOLE_NUMBER)):
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
