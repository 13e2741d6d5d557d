"""A request's tokens: its prompt and what was decoded so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def count_of(req: Req) -> int:
    """How many are known."""
    return len(req.origin_input_ids) + len(req.output_ids)


def ids_of(req: Req, start: int, end: int) -> npt.NDArray[np.int64]:
    """Token ids of positions [start, end), as far as they are known."""
    prompt = len(req.origin_input_ids)
    output = req.output_ids[max(start - prompt, 0) : max(end - prompt, 0)]
    parts = req.origin_input_ids[start:end], output
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
