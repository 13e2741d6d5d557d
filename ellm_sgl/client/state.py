"""What a server's state (`GET /ellm/state`) says, of one replica or of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resize_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """`resize` of a state: of the replica that is farthest from its size."""
    order = ("under way", "ceiling", "floor")
    every = [replica["resize"] for replica in state.get("replicas", (state,))]
    told = [found for outcome in order for found in every if found["outcome"] == outcome]
    return dict((told or every)[0])
