"""What a step costs that restores KV by recomputation, by swapping, or by both at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ellm_sgl.eval.simulator.machines import Machine
from ellm_sgl.latency import LatencyModel, StepWork
from ellm_sgl.latency.base import FloatArray, Quantity, larger, smaller
from ellm_sgl.policies.work_split import CONFIGURATIONS

RESTORATIONS = {
    "recompute": (1.0,),
    "swap": (0.0,),
    "both": tuple(sorted({l2 / (l1 + l2) for l1, l2 in CONFIGURATIONS})),
}
"""How the missing KV of a step may come back: values of φ, the share of the layers that are
recomputed; the rest is fetched from host memory. A step takes the one that makes it shortest. Both:
the six configurations of the eLLM paper, and either way alone."""


class RestoringModel(LatencyModel):
    """Steps as another model predicts them, their spans restored in a given way.

    It is the device of a simulation, and what policies are shown: a policy that plans to
    restore sees what restoring them costs here. Fixed: it never learns. Of what a step restores,
    `swap_tokens` and `recompute_share` say what host memory has not: at least that is computed
    again.

    Args:
        inner: predicts steps in which what is missing is recomputed in all layers.
        machine: gives the KV's size, the link, for the transfers' time (Eq. 6), and the restored
            tokens that host memory can hold; the rest has to be recomputed.
        shares: as in `RESTORATIONS`.
        fused: recomputed rows share one pass through the weights with the decode rows.
        overlapped: transfers run beside the computing.
    """

    def __init__(
        self,
        inner: LatencyModel,
        machine: Machine,
        shares: Sequence[float],
        fused: bool = True,
        overlapped: bool = True,
    ) -> None:
        self._inner = inner
        self._shares = np.array(shares)
        self._fused = fused
        self._overlapped = overlapped
        self._restore_s = machine.profile.restore_overhead_s
        self._token_s = machine.shape.kv_bytes_per_token / machine.profile.link_bytes_per_s
        self._beside_s = machine.profile.fetch_share * self._token_s
        self._latency_s = machine.profile.link_latency_s
        self._host_tokens = math.inf if machine.host_tokens is None else float(machine.host_tokens)

    def step_seconds(self, work: StepWork) -> FloatArray:
        if not np.any(work.restored_tokens):
            return self._inner.step_seconds(work)
        if len(self._shares) == 1:
            return np.asarray(self._seconds(work, float(self._shares[0])))
        return np.asarray(self._candidates(work).min(axis=0), np.float64)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Nothing."""

    def restored(self, work: StepWork) -> StepWork:
        """One step's work, told as a server tells it: how its recomputed rows came back."""
        if not work.restored_tokens:
            return work
        best = int(self._candidates(work).argmin())
        share = float(np.asarray(self._limited(self._each(work), work))[best])
        fetched = work.restored_tokens if share < 1 else 0.0
        return dataclasses.replace(work, swap_tokens=fetched, recompute_share=share)

    def _candidates(self, work: StepWork) -> FloatArray:
        """Seconds for each share (first axis) and each step."""
        return np.asarray(self._seconds(work, self._each(work)))

    def _each(self, work: StepWork) -> FloatArray:
        """The shares to choose from (first axis), for every step."""
        return self._shares.reshape((-1,) + (1,) * np.ndim(work.restored_tokens))

    def _seconds(self, work: StepWork, chosen: Quantity) -> Quantity:
        """Seconds of steps that recompute these shares of their layers."""
        shares = self._limited(chosen, work)
        swapped = (1 - shares) * work.restored_tokens
        link = self._token_s * swapped + self._latency_s * (swapped > 0)
        # What is only fetched is restored, too, which the model of computing does not see.
        fetches = smaller(work.restored_tokens, 1) - smaller(shares * work.restored_tokens, 1)
        compute = self._compute_seconds(work, shares, chosen)
        compute = compute + self._beside_s * swapped + self._restore_s * fetches
        return larger(compute, link) if self._overlapped else compute + link

    def _limited(self, shares: Quantity, work: StepWork) -> Quantity:
        """Shares, but that what the host cannot hold, or has not, is recomputed."""
        beyond = 1 - self._host_tokens / larger(work.restored_tokens, 1)
        lost = np.where(np.asarray(work.swap_tokens) > 0, work.recompute_share, 1.0)
        return larger(larger(shares, beyond), lost)

    def _compute_seconds(self, work: StepWork, shares: Quantity, chosen: Quantity) -> FloatArray:
        """`shares` of what is restored is computed, of which the tokens that the host lacks, more
        than the `chosen` share of the layers, in all layers."""
        span = {
            "restored_tokens": shares * work.restored_tokens,
            "restored_squares": shares * work.restored_squares,
            "restored_prefix": shares * work.restored_prefix,
            "swap_tokens": 0.0,
            "recompute_share": 1.0,
        }
        if self._fused:
            return self._inner.step_seconds(dataclasses.replace(work, **span))
        nothing = {name: 0.0 for name in span}
        whole = {name: getattr(work, name) for name in span if name.startswith("restored")}
        # A pass of its own, through the layers that are recomputed; of few tokens in all layers it
        # reads all weights.
        apart = np.where(
            np.asarray(shares) > chosen,
            self._inner.step_seconds(StepWork(0, 0, **{name: span[name] for name in whole})),
            chosen * self._inner.step_seconds(StepWork(0, 0, **whole)),
        )
        decode = self._inner.step_seconds(dataclasses.replace(work, **nothing))
        return np.where(span["restored_tokens"] > 0, apart, 0.0) + decode


def fetch_seconds(machine: Machine, tokens: float) -> float:
    """A whole request's KV fetched from host memory (the `swap` baseline); Eq. (6), l1 = L."""
    shape, profile = machine.shape, machine.profile
    return tokens * shape.kv_bytes_per_token / profile.link_bytes_per_s + profile.link_latency_s


def hcache_seconds(machine: Machine, tokens: float) -> float:
    """A whole request restored as in HCache (EuroSys'25): of the L layers so many from hidden
    states, whose K and V are projected again while the next layers' states arrive, and the others
    from KV, that the link and the projections take as nearly as possible the same time.
    """
    return float(_hcache_seconds(machine, tokens).min()) + machine.profile.link_latency_s


def hcache_size(machine: Machine) -> float:
    """What HCache keeps of a request in host memory, over the size of its KV."""
    shape = machine.shape
    by_hidden = int(_hcache_seconds(machine, 1.0).argmin())
    hidden = by_hidden * shape.hidden * shape.kv_bytes
    return hidden / shape.kv_bytes_per_token + 1 - by_hidden / shape.layers


def _hcache_seconds(machine: Machine, tokens: float) -> FloatArray:
    """Entry n: with n layers from hidden states, but for the link's latency."""
    shape, profile = machine.shape, machine.profile
    hidden_s = tokens * shape.hidden * shape.kv_bytes / profile.link_bytes_per_s
    kv_s = tokens * shape.kv_bytes_per_token / shape.layers / profile.link_bytes_per_s
    width = 2 * shape.kv_heads * shape.head_dim
    project_s = 2.0 * tokens * shape.hidden * width / profile.flops
    by_hidden = np.arange(shape.layers + 1)
    link = by_hidden * hidden_s + (shape.layers - by_hidden) * kv_s
    return np.asarray(np.maximum(link, by_hidden * project_s))
