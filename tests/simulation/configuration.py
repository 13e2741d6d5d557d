"""The server that a life is lived on."""

from __future__ import annotations

import random
from dataclasses import dataclass

CONTEXT = 96
"""Most tokens that any request has."""
VOCABULARY = 50
"""Small, so that different requests begin alike now and then."""


@dataclass(frozen=True)
class Configuration:
    """Settings of one server. The defaults are the plainest one: what a shrunk life says of its
    server is what matters to it."""

    layers: int = 2
    layer_group: int = 1
    block_tokens: int = 4
    device_blocks: int = 8
    growth_blocks: int = 0
    """That the device may come to have beside those it starts with."""
    host_blocks: int = 0
    hidden_layers: int = 0
    """Layers, from the lowest, of which the host has hidden states instead of KV."""
    hidden_on_device: bool = False
    radix: bool = True
    """SGLang's radix tree, else its chunk cache."""
    overlap: bool = False
    """SGLang's overlap loop: a step's result is looked at after the next step was launched."""
    chunk: int | None = None
    """Tokens prefilled at a time, a multiple of `block_tokens`."""
    mixed: bool = False
    """Chunks are computed beside decoding requests."""
    ranks: int = 1
    streams: bool = False
    """The device runs behind the host, as a CUDA device does; else the host computes."""
    prefetch: bool = True
    """Units are fetched while earlier layers compute."""
    store_blocks: int = 0
    """Of the store on disk."""
    policy: str = "scripted"
    max_running: int = 6
    context: int = CONTEXT
    """Most tokens of a request; a step may recompute as many rows, or `max_prefill`."""
    max_prefill: int = CONTEXT
    conservativeness: float = 1.0
    """SGLang's: below 1, requests are admitted for whose outputs there will be no room."""

    step_rows: int | None = None
    """That there is memory for in one step; None: for as many as it likes."""

    host_scaling: bool = False
    """Policies count on as much of the host as SLOs allow."""

    @property
    def most_blocks(self) -> int:
        """Of the device."""
        return self.device_blocks + self.growth_blocks


def draw(rng: random.Random) -> Configuration:
    """A random server, more often one that has to restore much."""
    block_tokens = rng.choice([1, 2, 2, 3, 4, 4])
    layers = rng.choice([1, 2, 4, 5, 6, 6])
    layer_group = rng.choice([1, 1, 1, 2])
    ranks = 2 if rng.random() < 0.2 else 1
    # A host tier of a few blocks is soon full: what is evicted then is lost, of a block in part.
    host_blocks = rng.choice([0, 1, 3, 5, 12, 60] if ranks == 1 else [0, 60, 60, 60])
    keeps_hidden = host_blocks > 0 and rng.random() < 0.3
    chunk = rng.choice([None, 8, 16, 24])
    device_blocks = max(rng.choice([16, 32, 48, 64]) // block_tokens, 5)
    room_for_hidden = 2 * device_blocks > host_blocks + 8  # a hidden state is half of a token's KV
    streams = not keeps_hidden and rng.random() < 0.25
    radix = rng.random() < 0.75
    return Configuration(
        layers=layers,
        layer_group=layer_group,
        block_tokens=block_tokens,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        hidden_layers=rng.randint(1, layers) if keeps_hidden else 0,
        hidden_on_device=keeps_hidden and room_for_hidden and rng.random() < 0.4,
        radix=radix,
        overlap=rng.random() < 0.5,
        chunk=None if chunk is None else max(chunk // block_tokens, 1) * block_tokens,
        mixed=chunk is not None and rng.random() < 0.6,
        ranks=ranks,
        streams=streams,
        prefetch=rng.random() < 0.8,
        policy=rng.choice(["scripted"] * 9 + ["fcfs", "swap", "fixed-ratio"]),
        max_running=rng.choice([4, 6, 8]),
        context=rng.choice([32, CONTEXT]),
        max_prefill=rng.choice([16, 40]),
        conservativeness=rng.choice([0.0, 0.0, 0.2, 1.0]),
        growth_blocks=0 if streams else rng.choice([0, 0, device_blocks // 2, 2 * device_blocks]),
        step_rows=rng.choice([None] * 6 + [6, 20, 40]),
        host_scaling=host_blocks > 0 and rng.random() < 0.15,
        # One rank: what is written, and so what goes first, depends on how fast each one's disk is.
        store_blocks=rng.choice([0] * 4 + [8, 8, 200, 200])
        if radix and not streams and ranks == 1
        else 0,
    )
