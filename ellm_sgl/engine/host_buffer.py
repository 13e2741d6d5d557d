"""How much of the host tier policies count on: less while tokens come too slowly, more while first
tokens do (Alg. 2 of the paper on elastic memory).

```
 TPOT violated in 3 of 5 iterations ─▶ half as much      (fewer requests are let in)
 else TTFT violated in 3 of 5       ─▶ twice as much     (more are let in)
```

A logical size: nothing that the tier has is dropped for it, and what must leave the device is
kept there as before. Policies alone see less room.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from ellm_sgl.policies import MemoryState, Requests

FACTOR = 2
"""α."""
WINDOW, VIOLATED = 5, 3
"""Of so many iterations so many decide."""
SHARE = 0.1
"""An iteration violates an SLO where more than this share of its requests do: what remains is the
90 % that goodput asks for (§6.1)."""


class HostBuffer:
    """Of one server.

    Args:
        tpot_slo_s: of requests that bring none.
    """

    def __init__(self, tpot_slo_s: float) -> None:
        self._tpot_slo_s = tpot_slo_s
        self._tpot: deque[bool] = deque(maxlen=WINDOW)
        self._ttft: deque[bool] = deque(maxlen=WINDOW)
        self.tokens: int | None = None
        """The logical size; None before anything was observed. At first a block (Alg. 2)."""

    def observe(self, running: Requests, waiting: Requests, memory: MemoryState) -> MemoryState:
        """What policies see of memory in this iteration."""
        slo = np.minimum(running.tpot_slo_s, self._tpot_slo_s)
        self._tpot.append(_violated(running.tpot_s > slo))
        first = waiting.tokens == waiting.prompt_tokens  # the others have had their first token
        self._ttft.append(_violated(waiting.waited_s[first] > waiting.ttft_slo_s[first]))
        least, most = memory.block_tokens, memory.host_tokens
        now = least if self.tokens is None else self.tokens
        if sum(self._tpot) >= VIOLATED:
            now = self._decided(now // FACTOR)
        elif sum(self._ttft) >= VIOLATED:
            now = self._decided(now * FACTOR)
        self.tokens = min(max(now, least), most)
        used = most - memory.host_free_tokens
        return dataclasses.replace(
            memory,
            host_tokens=self.tokens,
            host_free_tokens=max(self.tokens - used, 0),
        )

    def _decided(self, tokens: int) -> int:
        """The next decision takes iterations of its own."""
        self._tpot.clear()
        self._ttft.clear()
        return tokens


def _violated(those: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> bool:
    return bool(len(those) and those.mean() > SHARE)
