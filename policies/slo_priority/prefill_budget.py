"""How often prompts of less urgent requests may hold up more urgent ones that decode.

Nothing decodes while a prompt is computed: one of 800 tokens may take as long as a dozen steps. So
while more urgent requests decode, less urgent prompts have to save up for their time first.
"""

from __future__ import annotations

import math

from ellm_sgl.policies.base import FloatArray, Requests, SystemState

SHARE = 0.125
"""Of the time in which requests of different urgency are there: prompts of less urgent ones, while
more urgent requests decode."""
MOST_S = 10.0
"""A longer prompt need not save up more: it waits this / SHARE at most."""
MEMORY_S = 30.0
"""For so long after requests of different urgency were seen, others are expected."""


class PrefillBudget:
    """Time saved up for less urgent prompts."""

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._until_s = math.inf
        self._contended_s = -math.inf
        self._offered: dict[int, float] = {}

    def note(self, state: SystemState, several: bool) -> None:
        """Time has passed, and of the requests that were offered some were admitted.

        Args:
            several: some requests are more urgent than others.
        """
        if several:
            passed = max(state.now_s - self._until_s, 0.0)
            self._saved_s = min(self._saved_s + SHARE * passed, MOST_S)
            self._contended_s = state.now_s
        self._until_s = state.now_s
        if self._offered:
            admitted = self._offered.keys() & set(state.running.request_id.tolist())
            self._saved_s = max(self._saved_s - sum(self._offered[i] for i in admitted), 0.0)
            self._offered = {}

    @property
    def contended(self) -> bool:
        """Whether somebody more urgent than those present may well come."""
        return self._until_s - self._contended_s < MEMORY_S

    def affords(self, seconds: float) -> bool:
        """Whether enough has been saved up for a prompt of so many seconds."""
        return self._saved_s >= min(seconds, MOST_S)

    def offer(self, waiting: Requests, seconds: FloatArray) -> None:
        """These may be admitted; their prompts take so long, each. inf where nobody is held up: who
        comes next finds nothing saved up, and so is not held up at once."""
        self._offered = dict(zip(waiting.request_id.tolist(), seconds.tolist(), strict=True))
