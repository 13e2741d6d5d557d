"""Whether the server lets in the first who waits, where the policy would."""

from __future__ import annotations

from ellm_sgl.policies.base import SystemState

IN_VAIN = 4
"""Iterations in which it does not, after which no room is kept for that request."""
NOBODY = -1, 0


class Refusals:
    """Remembers whether the server lets in the first who waits, where the policy would.

    SGLang reserves for what those that run may still generate, paused ones included, and has so
    many addresses: room that is kept for whom it does not admit is nobody's.
    """

    def __init__(self) -> None:
        self.offered = False
        """Somebody was to be admitted in the iteration before."""
        self._asked = NOBODY
        """Who was first, and how many ran;"""
        self._count = 0
        """so many iterations in vain."""

    def kept_out(self, state: SystemState) -> bool:
        """Whether the same request has been first for so long, and nobody has ended meanwhile."""
        if not len(state.waiting):
            return False
        now = int(state.waiting.request_id[0]), len(state.running)
        if now != self._asked or len(state.prefilling):
            self._asked, self._count = now, 0
        elif self.offered:
            self._count += 1
        return self._count >= IN_VAIN
