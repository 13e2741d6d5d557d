"""Which simulations redo which figure of the paper."""

from __future__ import annotations

from typing import Any

from ellm_sgl.eval.paper.bounds import bounds
from ellm_sgl.eval.paper.jobs import Job, LoadSpec
from ellm_sgl.eval.simulator import MODES, Settings, preset
from ellm_sgl.eval.simulator.machines import PRESETS

MODEL = "llama2-13b"
"""What figures are about unless they say otherwise."""
SMALL = "llama3-8b"
"""A machine whose weights fill it, beside it."""
EAGER = 0.3
"""--schedule-conservativeness that SGLang's tuning guide gives for servers that admit too little;
each server runs at its default, 1, and at this, and is judged by the better of the two."""
SLO_SCALE = 1.5
"""TPOT SLO over the step of a full memory (roofline model). The paper's SLOs are not known here."""
TTFT_SLO_S = 10.0
SMALL_STRIDE = 4
"""Decode steps per decision on `SMALL`, where requests are evicted all the time."""
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Arrival rates, as multiples of `UNIT_RATE`."""
UNIT_RATE = 0.5
"""Requests per second; about where one A100 saturates with ShareGPT on Llama2-13B."""
GROUPS = (1, 2, 4, 8)
ERRORS = (-0.2, -0.1, 0.0, 0.1, 0.2)

ABLATION: dict[str, dict[str, Any]] = {
    "fcfs, both": {},
    "no policy (evict under pressure)": {"policy": "stock"},
    "recompute only": {"restore": "recompute"},
    "swap only": {"restore": "swap"},
    "no overlap": {"overlapped": False},
    "no fusion": {"fused": False},
    "recompute only, no fusion": {"restore": "recompute", "fused": False},
    "no TPOT SLO": {"tpot_slo_s": float("inf")},
    "lookahead 512": {"policy_options": {"lookahead": 512}},
    "slo-priority": {"policy": "slo-priority"},
}


def tpot_slos() -> dict[str, float]:
    """TPOT SLO of each preset, in seconds."""
    return {name: SLO_SCALE * bounds(preset(name), Settings()).step_s for name in PRESETS}


def plan(scale: float, latency_model: str) -> list[Job]:
    """All jobs, the longest first.

    Args:
        scale: multiplies the number of requests of every run; 1 is the full evaluation.
        latency_model: of the simulated devices.
    """
    slos = tpot_slos()

    def load(data_set: str, requests: int, machine: str, **more: Any) -> LoadSpec:
        count = max(round(requests * scale), 2)
        return LoadSpec(data_set, count, tpot_slo_s=slos[machine], ttft_slo_s=TTFT_SLO_S, **more)

    def settings(machine: str, **given: Any) -> Settings:
        stride = SMALL_STRIDE if machine == SMALL else Settings.stride
        usual = {"tpot_slo_s": slos[machine], "conservativeness": EAGER, "stride": stride}
        return Settings(latency_model=latency_model, **(usual | given))

    jobs = [
        Job("10", mode, machine, load(data_set, requests, machine),
            settings(machine, mode=mode, conservativeness=conservativeness), conservativeness)
        for machine, data_set, requests in (
            (MODEL, "sharegpt", 3000),
            ("llama2-70b", "sharegpt", 3000),
            (SMALL, "sharegpt", 600),
            ("llama2-70b", "l-eval", 100),
        )
        for conservativeness in (1.0, EAGER)
        for mode in MODES
    ]  # fmt: skip
    for mode in MODES:
        for conservativeness in (1.0, EAGER):
            server = settings(MODEL, mode=mode, conservativeness=conservativeness)
            jobs.append(Job("15", mode, MODEL, load("sharegpt", 300, MODEL), server,
                            search=(UNIT_RATE / 8, UNIT_RATE * 4)))  # fmt: skip
            jobs += [
                Job("14", mode, MODEL, load("sharegpt", 300, MODEL, per_second=x * UNIT_RATE),
                    server, x)
                for x in LOADS
            ]  # fmt: skip
    for restore in ("recompute", "swap", "both"):
        jobs += [
            Job("3", restore, MODEL, load("sharegpt", 300, MODEL),
                settings(MODEL, policy="fixed-ratio", policy_options={"ratio": r},
                         restore=restore), r)
            for r in RATIOS
        ]  # fmt: skip
    jobs += [
        Job("13", name, machine, load("sharegpt", 300, machine), settings(machine, **given))
        for machine in (MODEL, SMALL)
        for name, given in ABLATION.items()
    ]
    jobs += [
        Job("table 2", f"F = {group}", SMALL, load("sharegpt", 300, SMALL),
            settings(SMALL, layer_group=group), group)
        for group in GROUPS
    ]  # fmt: skip
    jobs += [
        Job("6.6", machine, machine, load("sharegpt", 300, machine),
            settings(machine, model_error=error), error)
        for machine in (MODEL, SMALL)
        for error in ERRORS
    ]  # fmt: skip
    return jobs
