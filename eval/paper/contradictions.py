"""Where figures of the paper do not fit its other figures, or its hardware: the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from ellm_sgl.client.workloads import LENGTHS, PAPER_GAP_S, PAPER_RATES
from ellm_sgl.eval.paper import claims
from ellm_sgl.eval.paper.bounds import bounds, capacity, mean_tokens, restorable
from ellm_sgl.eval.paper.claims import CHAT_70B, LONG_13B, LONG_70B, SMALLER, UNCACHED
from ellm_sgl.eval.paper.contradiction import Contradiction
from ellm_sgl.eval.paper.jobs import paper_machine
from ellm_sgl.eval.paper.plan import BASELINES
from ellm_sgl.eval.simulator import Settings
from ellm_sgl.eval.simulator.machines import DEVICES, MODELS, weight_bytes

TRIALS, RUN_S, WARM_UP_S, REQUESTS = 5, 4500.0, 120.0, 3000
"""§6.1: 1.25 hours for ShareGPT, two minutes of it to warm up, five trials."""
CONTEXT = 4096
"""Of Llama-2, in tokens."""


def contradictions(settings: Settings) -> list[Contradiction]:
    """All that were found.

    Args:
        settings: name the latency model of the bounds.
    """
    return [
        *_throughput_of_70b(),
        *_loads(settings),
        *_ratios(settings),
        _duration(settings),
        *_texts(),
    ]


def _throughput_of_70b() -> Iterator[Contradiction]:
    tpot, running = claims.TPOT_MS[CHAT_70B], claims.RUNNING
    speed = {mode: running[mode] / tpot[mode] * 1e3 for mode in running}
    said = ", ".join(f"{claims.THROUGHPUT[CHAT_70B][m]:g}x over {m}" for m in BASELINES)
    found = ", ".join(f"{speed['ellm'] / speed[m]:.2f}x" for m in BASELINES)
    yield Contradiction(
        "§6.2, 70B, ShareGPT", f"throughput {said}",
        "Running requests over mean TPOT is decode throughput: "
        + ", ".join(f"{m} {speed[m]:.0f}" for m in running)
        + f" tokens/s, that is {found}.",
    )  # fmt: skip
    slo_ms, share = 1e3 * claims.TPOT_SLO_S[CHAT_70B], claims.ATTAINMENT[CHAT_70B]["ellm"]
    yield Contradiction(
        "§6.2, 70B, ShareGPT", f"{share:.1%} within a TPOT of {slo_ms:.0f} ms",
        f"The mean TPOT is {tpot['ellm']:g} ms: above the SLO that nearly all requests keep.",
    )  # fmt: skip


def _loads(settings: Settings) -> Iterator[Contradiction]:
    yield Contradiction(
        "§6.1", f"mean interval {PAPER_GAP_S * 1e3:g} ms; {claims.BASE_RATE:g} requests/s, and "
        f"{PAPER_RATES['sharegpt']:g} after halving it",
        f"1 / {PAPER_GAP_S * 1e3:g} ms is {1 / PAPER_GAP_S:.1f} requests/s, halved "
        f"{2 / PAPER_GAP_S:.1f}.",
    )  # fmt: skip
    prompt, _ = mean_tokens("l-eval")
    yield Contradiction(
        "Table 1, §6.1", f"L-Eval's mean prompt of {prompt:,.0f} tokens",
        f"The context of Llama-2 is {CONTEXT:,} tokens, prompt and output together.",
    )  # fmt: skip
    rate = PAPER_RATES["l-eval"]
    parameters = weight_bytes(MODELS["llama2-70b"]) / 2
    needed, have = rate * prompt * 2 * parameters, 4 * DEVICES["a100-80g"].flops
    yield Contradiction(
        "§6.4, 70B, L-Eval", f"TTFT steady up to relative load 2.5, {2.5 * claims.BASE_RATE:g}/s",
        f"Prefill alone of {rate:g}/s, the lowest load, needs {needed / 1e15:.0f} PFLOP/s "
        f"(2 x parameters x prompt tokens); four A100 have {have / 1e15:.2f} at their peak.",
    )  # fmt: skip
    for case in (LONG_13B, LONG_70B):
        most = capacity(paper_machine(case[0]), settings, case[1])
        yield Contradiction(
            f"§6.4, {', '.join(case)}", f"loads of {rate:g} to {6 * rate:g} requests/s",
            f"By the latency model the machine serves {most:.2g} requests/s, all KV on the device: "
            f"the lowest load is {rate / most:,.0f} times that. The sweep here takes half of it as "
            "relative load 1.",
        )  # fmt: skip


def _ratios(settings: Settings) -> Iterator[Contradiction]:
    for case in (LONG_13B, LONG_70B):
        slo_s = claims.TPOT_SLO_S[case]
        found = restorable(paper_machine(case[0]), settings, case[1], UNCACHED[case], slo_s)
        yield Contradiction(
            f"§6.2, {', '.join(case)}", f"{UNCACHED[case]:.0%} uncached in the mean, within "
            f"{slo_s * 1e3:.0f} ms per token",
            f"{found.requests} requests fill memory so; restoring them, the link and the "
            f"processors both at work, takes {found.step_s:.2g} s a step. The SLO leaves room for "
            f"r = {found.ratio:.1%}.",
        )  # fmt: skip
    machine = paper_machine(CHAT_70B[0])
    prompt, output = mean_tokens(CHAT_70B[1])
    tokens = claims.RUNNING["ellm"] * (prompt + output / 2)
    yield Contradiction(
        "Fig. 11(a), 70B, ShareGPT", f"{UNCACHED[CHAT_70B]:.0%} uncached in the mean, "
        f"{claims.RUNNING['ellm']:.0f} requests running",
        f"So many, each half way, have {tokens / 1e3:.0f} thousand tokens; four A100 hold "
        f"{machine.kv_tokens / 1e3:.0f} thousand beside the weights: nothing has to be evicted.",
    )  # fmt: skip
    yield Contradiction(
        "Fig. 11(a), 70B, ShareGPT", "1.14x the running requests of vLLM-Recompute by "
        "36 % less memory for each",
        f"36 % less memory for each is room for {1 / (1 - UNCACHED[CHAT_70B]):.2f}x.",
    )  # fmt: skip


def _duration(settings: Settings) -> Contradiction:
    trial_s = (RUN_S - WARM_UP_S) / TRIALS
    speed = REQUESTS * LENGTHS["sharegpt"].output.mean / trial_s
    full = bounds(paper_machine(SMALLER), settings)
    return Contradiction(
        "§6.1, 13B, ShareGPT", "1.25 hours with five trials of 3,000 requests",
        f"{trial_s:.0f} s a trial is {speed:,.0f} output tokens/s. A full memory decodes "
        f"{full.requests / full.step_s:,.0f} on one A100, and at best "
        f"{full.throughput_ceiling:.2f} times that.",
    )  # fmt: skip


def _texts() -> Iterator[Contradiction]:
    yield Contradiction("§6.2, L-Eval", "TTFT up to 1.79x shorter",
                        "Its three baselines: 1.76x, 1.71x and 1.37x.")  # fmt: skip
    speed = claims.TABLE_2[4].throughput / claims.TABLE_2[2].throughput
    yield Contradiction(
        "§6.5", "fragmentation of 1.38 % for F = 4; 1.14x the throughput of F = 2",
        f"Table 2: {claims.TABLE_2[4].fragmentation:.2%}, and {speed:.2f}x.",
    )  # fmt: skip
    yield Contradiction(
        "§6.3, Fig. 13", "without overlapping up to 1.67x, without fusion up to 1.85x",
        "The slides of the talk have them the other way round.",
    )  # fmt: skip
