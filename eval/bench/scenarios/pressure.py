"""r, b and step time while a load rises to a multiple of memory and falls again.

The demo model with a host tier, from which what left the device is fetched. Step by step: the
uncached share r, the requests that decode b, and the step's time beside the SLO.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from ellm_sgl.client.process import ServerProcess
from ellm_sgl.client.replay import Request
from ellm_sgl.config.click_types import FACTOR, MILLISECONDS, TOKENS, TOKENS_OR_NONE
from ellm_sgl.eval.bench import loads
from ellm_sgl.eval.bench.all_steps import all_steps
from ellm_sgl.eval.bench.result import Column, Result, Taken
from ellm_sgl.eval.bench.scenario import Scenario, Setting, option, rounds_option

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 384
CALM_S, RISE_S = 8.0, 14.0
"""Seconds of calm before and after, and of the peak between."""


@dataclass(frozen=True)
class Pressure(Scenario):
    rounds: int = rounds_option(1)
    policy: str = option("fcfs")
    tpot_slo_ms: float = option(50.0, MILLISECONDS)
    device_tokens: int = option(3072, TOKENS)
    host_tokens: int = option(12_288, TOKENS_OR_NONE, "0: no host tier.")
    peak: float = option(3.0, FACTOR, "Multiple of device memory.")

    anew = True
    columns = (Column("tokens/s", "tokens_per_s"), Column("r in\nthe calm", "r_calm_max", "{:.2f}"),
               Column("at the\npeak", "r_peak_max", "{:.2f}"),
               Column("at the\nend", "r_final", "{:.2f}"), Column("steps", "steps"),
               Column("within\nSLO", "within_slo", "{:.1%}"),
               Column("p99\nTPOT ms", "tpot_p99", "{:.0f}", 1e3),
               Column("failed", "failed"), Column("retractions", "retractions"))  # fmt: skip

    def starters(self) -> loads.Starters:
        return {self.policy: loads.starter(
            "--ellm-policy", self.policy, "--ellm-tpot-slo-ms", self.tpot_slo_ms,
            "--ellm-device-kv-tokens", self.device_tokens, "--ellm-layer-group", 1,
            "--ellm-host-kv-tokens", self.host_tokens, "--disable-radix-cache",
        )}  # fmt: skip

    def settings(self) -> list[Setting]:
        return [Setting(self.policy, self.policy)]

    def load(self, cell: str, seed: int) -> list[Request]:
        """Calm at a third of memory, a peak, calm again."""
        rng = random.Random(seed + 1)
        size = PROMPT_TOKENS + OUTPUT_TOKENS
        calm = max(int(self.device_tokens / 3 / size), 1)
        parts = ((0.0, CALM_S / 2, calm),
                 (CALM_S, RISE_S / 4, int(self.peak * self.device_tokens / size)),
                 (CALM_S + 2 * RISE_S, CALM_S / 2, calm))  # fmt: skip
        times = [begin + rng.uniform(0, span) for begin, span, n in parts for _ in range(n)]
        return [Request(at, loads.draw_tokens(PROMPT_TOKENS, rng), OUTPUT_TOKENS, exact=False)
                for at in sorted(times)]  # fmt: skip

    def warm_up(self, name: str, server: ServerProcess) -> None:
        """None: the calm is for that, and every step is reported."""

    def measure(self, server: ServerProcess, setting: Setting, load: list[Request]) -> Taken:
        with all_steps(server) as taken:
            found = loads.figures(loads.replayed(server, load))
            steps = [s for s in taken() if s["decode_rows"]]
        state = server.state()
        r = [s["restored_tokens"] / max(s["decode_tokens"], 1) for s in steps]
        b = [int(s["decode_rows"]) for s in steps]
        step_ms = [s["seconds"] * 1e3 for s in steps]
        at_s = np.cumsum([s["seconds"] for s in steps]).tolist()
        predicted_ms = [s["predicted_s"] * 1e3 for s in steps]
        trace = {"at_s": at_s, "r": r, "b": b, "step_ms": step_ms, "predicted_ms": predicted_ms}
        found |= {
            "steps": len(steps),
            "within_slo": float(np.mean(np.array(step_ms) <= self.tpot_slo_ms)),
            "r_calm_max": max((x for x, rows in zip(r, b, strict=True) if rows <= 2), default=0.0),
            "r_peak_max": max(r),
            "r_final": r[-1],
            "retractions": state["retractions_total"],
        }
        return Taken(found, detail={"trace": trace, "fallbacks": state["policy"]["fallbacks"]})

    def notes(self, result: Result) -> list[str]:
        replaced = [s.detail["fallbacks"] for s in result.samples if s.detail["fallbacks"]]
        return [f"answers of the policy that were replaced: {replaced or 'none'}"]

    def plot(self, result: Result, figure: Any) -> None:
        """The first round over time: b, r, step time and SLO."""
        trace = result.samples[0].detail["trace"]
        figure.set_size_inches(9, 7)
        top, middle, bottom = figure.subplots(3, 1, sharex=True)
        top.step(trace["at_s"], trace["b"], where="post")
        top.set_ylabel("requests decoding, b")
        middle.step(trace["at_s"], trace["r"], where="post", color="tab:orange")
        middle.set(ylabel="uncached share, r", ylim=(0, None))
        bottom.plot(trace["at_s"], trace["step_ms"], ".", markersize=2, label="measured")
        bottom.plot(trace["at_s"], trace["predicted_ms"], linewidth=0.8, label="predicted")
        bottom.axhline(self.tpot_slo_ms, color="tab:red", linestyle="--", label="TPOT SLO")
        bottom.set(ylabel="step time, ms", xlabel="time with work to do, s")
        bottom.legend()
        figure.suptitle(f"{self.policy}: load up to {self.peak:g} x the {self.device_tokens:,} "
                        "tokens of device memory")  # fmt: skip
