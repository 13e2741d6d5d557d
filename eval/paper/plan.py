"""Which simulations redo which figure of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ellm_sgl.eval.paper.bounds import bounds, capacity
from ellm_sgl.eval.paper.claims import (
    CHAT_13B,
    CHAT_70B,
    FUSED_RATIO,
    LONG_13B,
    LONG_70B,
    MAX_RUNNING,
    RELATIVE_LOADS,
    TABLE_2,
    TPOT_SLO_S,
    Case,
)
from ellm_sgl.eval.paper.jobs import Job, LoadSpec
from ellm_sgl.eval.simulator import MODES, Settings, preset

SMALL = ("llama3-8b", "sharegpt")
"""A machine whose weights fill it: not the paper's."""
BASELINES = MODES[1:]
ADMISSIONS = ("paper", "vllm", "sglang")
"""Of the baselines; "paper" is theirs in the paper."""
EAGER = 0.3
"""--schedule-conservativeness that SGLang's tuning guide gives for servers that admit too little;
each server with SGLang's admission runs at its default, 1, and at this, and is judged by the better
of the two."""
SLO_SCALE = 1.5
"""TPOT SLO over the step of a full memory (roofline model), for `SMALL`."""
AS_PRINTED = {"forecast": False, "pause": False}
"""Options that make `fcfs` the paper's Eq. (1): the next step, current lengths, nobody pauses."""
RATIOS = (0.0, 0.1, 0.2, 0.3, FUSED_RATIO, 0.5, 0.7, 0.9)
GROUPS = (1, *TABLE_2)
ERRORS = (-0.2, 0.0, 0.2)

REQUESTS = {CHAT_13B: 1000, CHAT_70B: 2000, LONG_13B: 48, LONG_70B: 80, SMALL: 400}
"""Of each load of Figs. 10 to 12; those are left out that are larger than the device, which no
server of whole requests takes (one in six of L-Eval's on 13B). The paper sends 3,000 and does not
say how often."""
SWEEP_REQUESTS = {LONG_13B: 24, LONG_70B: 60}
"""Of each point of Figs. 14 and 15."""
PART_REQUESTS = {CHAT_13B: 300, CHAT_70B: 1000, SMALL: 300}
"""Of every other figure: as many as outgrow memory."""
STRIDE = {SMALL: 4, LONG_13B: 64, LONG_70B: 32}
"""Decode steps per decision, where not the default: few where requests are evicted all the time,
many where a few requests run for thousands of steps."""

ABLATION: dict[str, dict[str, Any]] = {
    "ellm": {},
    "no overlap": {"overlapped": False},
    "no fusion": {"fused": False},
    "recompute only": {"restore": "recompute"},
    "swap only": {"restore": "swap"},
    "as printed": {"policy_options": AS_PRINTED},
    "no policy (evict under pressure)": {"policy": "stock"},
    "slo-priority": {"policy": "slo-priority"},
}


def plan(scale: float, latency_model: str) -> list[Job]:
    """All jobs, the longest first.

    Args:
        scale: multiplies the number of requests of every run; 1 is the full evaluation.
        latency_model: of the simulated devices.
    """
    planner = _Planner(scale, latency_model)
    return [
        *planner.end_to_end(),
        *planner.load_sweeps(),
        *planner.fixed_ratios(),
        *planner.left_out(),
        *planner.layer_groups(),
        *planner.model_errors(),
    ]


def unit_rates(latency_model: str) -> dict[Case, float]:
    """Requests per second at relative load 1, by case of the load sweeps: half of what the machine
    serves with all KV on the device. The paper's own unit is beyond any of them by far."""
    settings = Settings(latency_model=latency_model, max_running=MAX_RUNNING)
    return {c: capacity(preset(c[0]), settings, c[1]) / 2 for c in SWEEP_REQUESTS}


def tpot_slo_s(case: Case) -> float:
    """Table 1's; of `SMALL`, this report's own."""
    if case in TPOT_SLO_S:
        return TPOT_SLO_S[case]
    return SLO_SCALE * bounds(preset(case[0]), Settings()).step_s


@dataclass(frozen=True)
class _Planner:
    scale: float
    latency_model: str

    def end_to_end(self) -> Iterator[Job]:
        """Figs. 10 to 12."""
        for case, requests in REQUESTS.items():
            for eager in (1.0, EAGER):
                yield self._job("10", "ellm", case, requests, eager, conservativeness=eager)
            yield self._job("10", "ellm, as printed", case, requests, policy_options=AS_PRINTED)
            for mode in BASELINES:
                for admission in ADMISSIONS:
                    name = f"{mode}, {admission}"
                    yield self._job("10", name, case, requests, mode=mode, admission=admission)
                name = f"{mode}, sglang"
                yield self._job("10", name, case, requests, 1.0, mode=mode, conservativeness=1.0)

    def load_sweeps(self) -> Iterator[Job]:
        """Figs. 14 and 15."""
        rates = unit_rates(self.latency_model)
        for case, requests in SWEEP_REQUESTS.items():
            for mode in MODES:
                given: dict[str, Any] = (
                    {} if mode == "ellm" else {"mode": mode, "admission": "paper"}
                )
                for x in RELATIVE_LOADS:
                    rate = x * rates[case]
                    yield self._job("14", mode, case, requests, x, rate, **given)

    def fixed_ratios(self) -> Iterator[Job]:
        """Figs. 3(b), 4 and 5(b)."""
        requests = PART_REQUESTS[CHAT_13B]
        for restore in ("both", "recompute"):
            for ratio in RATIOS:
                yield self._job("4", restore, CHAT_13B, requests, ratio, restore=restore,
                                policy="fixed-ratio", policy_options={"ratio": ratio})  # fmt: skip
        for mode in ("recompute", "swap"):
            yield self._job("4", mode + ", whole requests", CHAT_13B, requests,
                            mode=mode, admission="vllm")  # fmt: skip
        yield self._job("5", "two passes", CHAT_13B, requests, FUSED_RATIO, restore="recompute",
                        policy="fixed-ratio", policy_options={"ratio": FUSED_RATIO},
                        fused=False)  # fmt: skip

    def left_out(self) -> Iterator[Job]:
        """Fig. 13."""
        for case, requests in PART_REQUESTS.items():
            for name, given in ABLATION.items():
                yield self._job("13", name, case, requests, **given)
            for mode in BASELINES:
                given = {"mode": mode, "admission": "paper"}
                yield self._job("13", mode, case, requests, **given)

    def layer_groups(self) -> Iterator[Job]:
        """Table 2."""
        for group in GROUPS:
            requests = PART_REQUESTS[CHAT_70B]
            yield self._job("table 2", f"F = {group}", CHAT_70B, requests, group, layer_group=group)

    def model_errors(self) -> Iterator[Job]:
        """§6.6."""
        for case in (CHAT_13B, SMALL):
            for error in ERRORS:
                requests = PART_REQUESTS[case]
                # Of its rates, as in the paper: a step then seems to take so much less.
                wrong = 1 / (1 + error) - 1
                yield self._job("6.6", case[0], case, requests, error, model_error=wrong)

    def _job(
        self,
        figure: str,
        variant: str,
        case: Case,
        requests: int,
        x: float = 0.0,
        per_second: float | None = None,
        **given: Any,
    ) -> Job:
        machine, data_set = case
        slo_s = tpot_slo_s(case)
        usual = {
            "tpot_slo_s": slo_s,
            "max_running": MAX_RUNNING,
            "conservativeness": EAGER,
            "stride": STRIDE.get(case, Settings.stride),
        }
        settings = Settings(latency_model=self.latency_model, **(usual | given))
        load = LoadSpec(
            data_set,
            max(round(requests * self.scale), 2),
            per_second,
            slo_s,
            largest=preset(machine).kv_tokens - settings.block_tokens,
        )
        return Job(figure, variant, machine, load, settings, x)
