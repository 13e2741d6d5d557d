"""Has a running server's pool come to another size, and tells what has become of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from ellm_sgl.client.state import accepted, resize_of, resized_to, settled, tokens_there
from ellm_sgl.serve.asking import AskError, ask, of_this_version

WAIT_S = 60.0
"""How long to wait for a pool that is under way."""
ENDS = {
    "applied": "the pool has this size",
    "floor": "what is in use does not fit into less now; ask again when requests have ended",
    "ceiling": "the machine gives no more memory now",
    "bounded": "its budget, a release of its memory, or another order keeps it from this size",
    "under way": f"still under way after {WAIT_S:.0f} s; `ellm-sgl top` shows it",
}


@dataclass(frozen=True)
class Resized:
    """What became of a size that was asked for. `tokens` are of KV, as the pool holds them now."""

    asked_tokens: int
    tokens: int
    committed_bytes: int
    outcome: str
    """One of `ENDS`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.asked_tokens:,} tokens asked for, {self.tokens:,} there, "
            f"{self.committed_bytes / 2**20:,.1f} MiB: {ENDS[self.outcome]}"
        )


def resize(client: httpx.Client, tokens: int, admin_key: str | None = None) -> Resized:
    """Ask for a pool of so many tokens, and wait until it has come to its end.

    Args:
        admin_key: the server's, where it has one.

    Raises:
        AskError: the server refuses the size, or does not answer, or not as this version does.
    """
    with of_this_version():
        most = resize_of(_state(client))["most_tokens"]
        wanted = {"server_args": {"ellm_device_kv_tokens": tokens}}
        if not accepted(ask(client, "/set_internal_state", wanted, admin_key)):
            raise AskError(
                f"{tokens} tokens are refused: give a block at least, and {most} at most, what the "
                "server started with or its --ellm-max-device-kv-tokens; its log says more"
            )
        return _outcome(tokens, settled(lambda: _state(client), WAIT_S))


def _outcome(tokens: int, state: Mapping[str, Any]) -> Resized:
    replicas = state.get("replicas", [state])
    committed = sum(replica["device_bytes_committed"] for replica in replicas)
    outcome = resized_to(state, tokens)["outcome"]
    return Resized(tokens, tokens_there(state), committed, outcome)


def _state(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = ask(client, "/ellm/state?integrity=false")
    return found
