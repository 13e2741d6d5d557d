"""Stamps: what stands for KV. A stamp is a hash of the layer and of all tokens up to a position, so
that KV of another token, another context or another layer is told from the right one.

A stamp has 52 bits: it is exact in float64, through whatever the pools and projections do to it.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.simulation.configuration import CONTEXT, VOCABULARY

Hashes = npt.NDArray[np.int64]
Stamps = npt.NDArray[np.float64]

END = VOCABULARY - 1
"""The token that ends an answer; in no prompt."""
POISON = 0.5
"""What lies in memory that nobody owns: no stamp is a fraction."""

_BITS = (1 << 52) - 1
_WORD = (1 << 64) - 1


@functools.cache
def _multiplier(layer: int) -> int:
    return random.Random(f"layer {layer}").getrandbits(62) | 1


def stamps(hashes: Any, layer: int) -> Any:
    """Stamps of positions in a layer, float64.

    Args:
        hashes: int64 [n] of the positions' prefixes, of NumPy's or PyTorch's.
    """
    bits = ((hashes * _multiplier(layer)) >> 11) & _BITS
    if isinstance(bits, torch.Tensor):
        return bits.double()
    return bits.astype(np.float64)


def token_of(*what: object) -> int:
    """A token that depends on nothing else."""
    return random.Random(repr(what)).randrange(1, END)


class Transcript:
    """A request's tokens as the model knows them: a sampled token at once, SGLang later.

    Args:
        prompt: its tokens.
        salt: samples of one prompt differ in it.
    """

    def __init__(self, prompt: list[int], salt: int) -> None:
        self.tokens: list[int] = []
        self.stops = False
        """The next token ends the answer."""
        self._hashes = np.zeros(CONTEXT + 8, np.int64)
        self._stamps: dict[int, Stamps] = {}
        """By layer, of the positions that were asked for."""
        self._last = 0x9E3779B97F4A7C15
        self._salt = salt
        for token in prompt:
            self._append(token)

    def hashes(self, end: int) -> Hashes:
        """Of the prefixes up to and including positions 0..end-1. A view."""
        assert end <= len(self.tokens), f"{end} tokens asked for, {len(self.tokens)} exist"
        return self._hashes[:end]

    def stamps(self, end: int, layer: int) -> Stamps:
        """Of positions 0..end-1 in a layer. A view."""
        known = self._stamps.get(layer)
        if known is None or len(known) < end:
            self._stamps[layer] = known = stamps(self.hashes(len(self.tokens)), layer)
        return known[:end]

    def next_token(self, position: int) -> int:
        """What the model samples for `position`; the same each time it is asked."""
        assert position <= len(self.tokens)
        if position == len(self.tokens):
            mixed = (self._last * 0xD1B54A32D192ED03 + self._salt) & _WORD
            self._append(END if self.stops else 1 + (mixed >> 40) % (END - 1))
        return self.tokens[position]

    def _append(self, token: int) -> None:
        mixed = ((self._last ^ token) * 0xBF58476D1CE4E5B9) & _WORD
        self._last = mixed ^ (mixed >> 29)
        self._hashes[len(self.tokens)] = self._last - (1 << 64) * (self._last >> 63)
        self.tokens.append(token)
