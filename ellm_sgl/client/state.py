"""What a server's state (`GET /ellm/state`) says, of one replica or of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LOOK_S = 0.02
"""Between two looks at a pool that is under way."""


def resize_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """`resize` of a state: of the replica that is farthest from its size."""
    order = ("under way", "ceiling", "floor")
    every = [replica["resize"] for replica in _replicas(state)]
    told = [found for outcome in order for found in every if found["outcome"] == outcome]
    return dict((told or every)[0])


def resized_to(state: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """`resize_of` a settled state, once so many tokens were asked for: `bounded` where the pool has
    come to another size, since a shared budget, a release of its memory, or another order keeps it
    from this one."""
    found, block = resize_of(state), _replicas(state)[0]["block_tokens"]
    if found["outcome"] == "applied" and tokens_there(state) != tokens - tokens % block:
        found["outcome"] = "bounded"
    return found


def tokens_there(state: Mapping[str, Any]) -> int:
    """Of KV that the pool may hold; of several replicas, the smallest."""
    return min(tokens_in(state, state["device_units_total"]) for state in _replicas(state))


def settled(look: Callable[[], Mapping[str, Any]], wait_s: float) -> Mapping[str, Any]:
    """The state in which the pool is under way no more, or the last one seen after `wait_s`.

    Args:
        look: asks for the state.
    """
    deadline = time.monotonic() + wait_s
    while resize_of(state := look())["outcome"] == "under way" and time.monotonic() <= deadline:
        time.sleep(LOOK_S)
    return state


def accepted(answer: Any) -> bool:
    """Whether every replica has taken what was posted to `/set_internal_state`."""
    return answer is True or (isinstance(answer, list) and all(answer))


def tokens_in(state: Mapping[str, Any], units: int) -> int:
    """Of KV that so many units of one replica hold."""
    tokens: int = round(units * state["block_tokens"] / state["layer_groups"])
    return tokens


def _replicas(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The state of each; of a server without replicas, its own."""
    replicas: Sequence[Mapping[str, Any]] = state.get("replicas", (state,))
    return replicas
