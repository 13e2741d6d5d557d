"""How long answers get: a survival function, learnt from those that have ended.

The model is piecewise exponential. In each bin of lengths the hazard, the share of answers that
end with a token, is a constant: the answers that ended in the bin, over the tokens that all
answers spent there. Answers still being written, and those cut off at their bound, count with the
tokens that they have (they are *censored*): short answers end first, and would otherwise make all
look short. Where little has been seen a prior counts as much as one answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LONGEST = 1 << 22
EDGES: IntArray = np.unique(np.append(0, np.geomspace(4, LONGEST, 77)).astype(np.int64))
"""Bin k holds lengths from edge k to below edge k + 1, in tokens."""
WIDTHS = np.diff(EDGES)

PRIOR_TOKENS, PRIOR_HAZARD = 256, 0.4
_PRIOR: FloatArray = PRIOR_HAZARD / np.maximum(EDGES[1:], PRIOR_TOKENS)
"""Hazard where nothing was seen: an answer that is long already will go on for long. Too long a
guess puts requests off until it is mended, too short a one lets in more than there is room for."""
REMEMBERED = 64
"""Answers after which an older one counts 1 / e."""
CLASS_PRIOR = 4.0
"""So many answers' weight all classes together have in what is known of one."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Answers that have ended, by bin; recent ones count more."""

    ended: FloatArray
    """Those that ended there by themselves."""
    spent: FloatArray
    """Tokens that answers spent there."""

    @classmethod
    def nothing(cls) -> Seen:
        return cls(np.zeros(len(WIDTHS)), np.zeros(len(WIDTHS)))

    @classmethod
    def of(cls, tokens: IntArray) -> Seen:
        """Answers of these lengths, int64 [answers], that ended by themselves; each counts as
        much."""
        ended, _ = np.histogram(np.minimum(tokens, LONGEST - 1), EDGES)
        return cls(ended.astype(np.float64), _spent(tokens))

    def and_one(self, tokens: int, cut_off: bool) -> Seen:
        """With one answer more.

        Args:
            cut_off: it ended at the bound that the request had set, not by itself.
        """
        keep = 1.0 - 1.0 / REMEMBERED
        ended, spent = keep * self.ended, keep * self.spent + _spent(np.array([tokens]))
        if not cut_off:
            ended[np.searchsorted(EDGES, min(tokens, LONGEST - 1), side="right") - 1] += 1.0
        return Seen(ended, spent)

    def hazard(self, going_on: IntArray, prior: FloatArray, weight: float) -> FloatArray:
        """Share of answers that end with a token, in each bin.

        Args:
            going_on: tokens of answers that have not ended.
            prior: hazard that counts as `weight` answers do.
        """
        spent = self.spent + _spent(going_on)
        return (self.ended + weight * WIDTHS * prior) / (spent + weight * WIDTHS)


def _spent(tokens: IntArray) -> FloatArray:
    """Tokens that answers of these lengths spent in each bin."""
    tokens = np.sort(tokens)
    below = np.searchsorted(tokens, EDGES)
    up_to = np.append(0, np.cumsum(tokens))[below] + EDGES * (len(tokens) - below)
    return np.asarray(np.diff(up_to), np.float64)


@dataclass(frozen=True, eq=False)
class OutputLengths:
    """What is known of output lengths when a policy is asked. Requests of one priority are a class:
    they tell most about each other."""

    seen: Seen
    """Of all classes."""
    by_class: Mapping[int, Seen]
    generated: IntArray
    """Tokens that each running request has generated, int64 [running],"""
    priority: IntArray
    """and its class."""

    @classmethod
    def nothing(cls) -> OutputLengths:
        nobody = np.zeros(0, np.int64)
        return cls(Seen.nothing(), {}, nobody, nobody)

    def survival(self, generated: IntArray, priority: IntArray, ahead: IntArray) -> FloatArray:
        """Probability that requests which go on after `generated` tokens go on after `ahead` more,
        their bounds aside.

        Args:
            generated, priority: int64 [requests].
            ahead: int64 [times], tokens.

        Returns:
            float64 [times, requests].
        """
        return np.asarray(np.exp(-self.cumulative_hazard(generated, priority, ahead)))

    def cumulative_hazard(
        self, generated: IntArray, priority: IntArray, ahead: IntArray
    ) -> FloatArray:
        """Minus the logarithm of `survival`, which takes the same."""
        result = _between(self._pooled, generated, ahead)
        for kind, cumulative in self._cumulative.items():
            members = priority == kind
            if members.any():
                result[:, members] = _between(cumulative, generated[members], ahead)
        return result

    @property
    def doubt(self) -> float:
        """Relative standard error of the hazards' level: of a few ends little is known."""
        return 1.0 / math.sqrt(1.0 + float(self.seen.ended.sum()))

    @cached_property
    def _hazard(self) -> FloatArray:
        return self.seen.hazard(self.generated, _PRIOR, 1.0)

    @cached_property
    def _pooled(self) -> FloatArray:
        return _summed(self._hazard)

    @cached_property
    def _cumulative(self) -> dict[int, FloatArray]:
        if len(self.by_class) < 2:  # it is what is known of all
            return {}
        found = {}
        for kind, seen in self.by_class.items():
            going_on = self.generated[self.priority == kind]
            found[kind] = _summed(seen.hazard(going_on, self._hazard, CLASS_PRIOR))
        return found


def _between(cumulative: FloatArray, generated: IntArray, ahead: IntArray) -> FloatArray:
    """Hazard of requests with these cumulative hazards at every edge; [times, requests]."""
    # Those that wait come last, and have mostly generated nothing: they are alike.
    alike = len(generated) - (int(generated.nonzero()[0].max(initial=-1)) + 2)
    distinct = generated[: len(generated) - max(alike, 0)]
    now, later = np.interp(distinct, EDGES, cumulative), distinct + ahead[:, None]
    hazard = np.interp(later, EDGES, cumulative) - now
    return hazard if alike <= 0 else np.append(hazard, np.repeat(hazard[:, -1:], alike, 1), 1)


def _summed(hazard: FloatArray) -> FloatArray:
    """The cumulative hazard at every edge."""
    return np.append(0.0, np.cumsum(hazard * WIDTHS))
