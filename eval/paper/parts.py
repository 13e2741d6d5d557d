"""Rows of everything but the end-to-end loads: parts of eLLM, overheads, models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ellm_sgl.eval.paper import claims
from ellm_sgl.eval.paper.bounds import restorable
from ellm_sgl.eval.paper.claims import CASES, CHAT_13B, CHAT_70B, FUSED_RATIO, LARGER, Case
from ellm_sgl.eval.paper.end_to_end import raw, tpot_ms, ttft, within_slo
from ellm_sgl.eval.paper.figure_7 import EXAMPLES, example
from ellm_sgl.eval.paper.jobs import Done, paper_machine
from ellm_sgl.eval.paper.plan import BASELINES
from ellm_sgl.eval.paper.results import Results, by_variant
from ellm_sgl.eval.paper.row import Row, over, percent
from ellm_sgl.eval.simulator import Machine, preset
from ellm_sgl.eval.simulator.machines import ALL_REDUCE_S
from ellm_sgl.eval.simulator.settings import device_model
from ellm_sgl.eval.validate.results import MEASURES
from ellm_sgl.latency import StepWork

FIGURE_7 = {"A": 2, "B": 4}


def parts(results: Results) -> Iterator[Row]:
    """In the paper's order."""
    yield from _fixed_ratio(results)
    yield from _fused(results)
    yield from _figure_7()
    yield from _left_out(results)
    yield from _table_2(results)
    yield from _model_error(results)
    yield from _overheads(results)
    yield from _links(results)
    yield from _unsimulated()
    yield from _validation(results)


UNAFFECTED = 1.05
"""TPOT over that of a baseline, up to which it is "almost unaffected" (§2.3)."""


def _fixed_ratio(results: Results) -> Iterator[Row]:
    lines = by_variant(results.of("4"))
    both = {d.job.x: d for d in lines["both"]}
    # Also at r = 0 pressure evicts parts of requests: all cached are those of whole requests.
    (all_cached,), (swapped,) = (lines[f"{way}, whole requests"] for way in ("recompute", "swap"))
    baseline, half = max(all_cached, swapped, key=raw), both[0.5]
    kept = [d for d in both.values() if tpot_ms(d) <= UNAFFECTED * tpot_ms(baseline)]
    best, fastest = max(kept, key=raw, default=None), max(both.values(), key=raw)
    load = ", ".join(CHAT_13B)
    at = "At no r" if best is None else f"At r = {best.job.x:g}"
    yield Row(
        "Fig. 4", f"tokens/s at the best fixed ratio that leaves TPOT as it is, over the better of "
        f"recomputing and swapping whole requests: {load}",
        claims.FIXED_RATIO["tokens/s"],
        None if best is None else over(raw(best), raw(baseline)), None,
        f"{at}; whatever TPOT is {raw(fastest) / raw(baseline):.2f} at r = {fastest.job.x:g}, "
        f"{tpot_ms(fastest):.0f} ms ({tpot_ms(baseline):.0f}): every uncached token is restored in "
        "every step.", "x",
    )  # fmt: skip
    yield Row(
        "Fig. 3(b)", f"requests that run together at r = 0.5 over all cached: {load}",
        claims.FIXED_RATIO["running"], over(half.sim.running_mean, all_cached.sim.running_mean),
        None, f"TPOT {tpot_ms(half):.0f} ms ({tpot_ms(all_cached):.0f} all cached).", "x",
    )  # fmt: skip
    yield Row(
        "Fig. 3(b)", f"mean TTFT at r = 0.5 over all cached: {load}",
        claims.FIXED_RATIO["ttft"], over(ttft(half), ttft(all_cached)), None,
        "From the start here; the paper switches after 200 s.", "x",
    )  # fmt: skip


def _fused(results: Results) -> Iterator[Row]:
    (apart,) = results.of("5")
    one_pass = next(d for d in by_variant(results.of("4"))["recompute"] if d.job.x == FUSED_RATIO)
    load = f"r = {FUSED_RATIO}, {', '.join(CHAT_13B)}"
    why = (
        "Fusion saves one reading of the weights; that computing also hides reading KV is not "
        f"modelled. Recomputing {FUSED_RATIO:.0%} of all tokens dwarfs both."
    )
    for what, said, figure in (
        ("tokens/s", claims.FUSED_TOKENS, raw),
        ("TPOT", claims.FUSED_TPOT, tpot_ms),
    ):
        yield Row("Fig. 5(b)", f"{what}, one pass over two: {load}", said,
                  over(figure(one_pass), figure(apart)), None, why, "x")  # fmt: skip
    yield Row(
        "Fig. 5(b)", f"TTFT, one pass over two: {load}", None,
        over(ttft(one_pass), ttft(apart)), None,
        "The paper: longer, for the memory that fusion takes. Here it takes none: K1 and K2 share "
        "the layer.", "x",
    )  # fmt: skip
    for loaded, ratio in results.measured.fused.items():
        yield Row(
            "Fig. 5(b)", f"step time, one pass over two: {loaded}", claims.FUSED_TPOT, None, ratio,
            "Real servers, ellm-sgl bench fusion: on a CPU the rows, not the weights, are "
            "what a step takes time for.", "x",
        )  # fmt: skip


def _figure_7() -> Iterator[Row]:
    for name, (l1, l2) in EXAMPLES.items():
        found = example(name)
        yield Row(
            "Fig. 7", f"transient units of example {name}: {l1} layers swapped, {l2} recomputed",
            FIGURE_7[name], None, len(found.transient),
            "On the page table. The server keeps two units for each block in flight, whatever "
            "(l1, l2) is.",
        )  # fmt: skip


def _left_out(results: Results) -> Iterator[Row]:
    for case, runs in results.by_case("13").items():
        by_name = {d.job.variant: d for d in runs}
        for part, tokens, first in (
            ("no overlap", claims.NO_OVERLAP, claims.NO_OVERLAP_TTFT),
            ("no fusion", claims.NO_FUSION, claims.NO_FUSION_TTFT),
        ):
            yield from _without(case, part, by_name, tokens.get(case, {}), first.get(case))
        whole = within_slo(by_name["ellm"])
        for name, done in by_name.items():
            if name not in ("ellm", *BASELINES):
                yield Row(
                    "Fig. 13", f"tokens/s within the TPOT SLO, {name} over eLLM: {', '.join(case)}",
                    None, over(within_slo(done), whole), None,
                    f"Raw {raw(done):.4g}, eLLM {raw(by_name['ellm']):.4g}.", "x",
                )  # fmt: skip


def _without(
    case: Case,
    part: str,
    runs: Mapping[str, Done],
    said: Mapping[str, float],
    said_ttft: float | None,
) -> Iterator[Row]:
    ours, load = runs[part], ", ".join(case)
    for mode, claim in said.items():
        yield Row(
            "Fig. 13(a)", f"tokens/s within the TPOT SLO, {part}, over {mode}: {load}", claim,
            over(within_slo(ours), within_slo(runs[mode])), None,
            "Little is restored, so that little is lost with it.", "x",
        )  # fmt: skip
    if said_ttft is not None:
        slowest = max(ttft(runs[mode]) for mode in BASELINES)
        yield Row("Fig. 13(b)", f"TTFT of the slowest baseline over {part}: {load}", said_ttft,
                  over(slowest, ttft(ours)), None, "", "x")  # fmt: skip


def _table_2(results: Results) -> Iterator[Row]:
    measured, tables = results.measured, results.overheads.table_seconds
    groups = {round(d.job.x): d for d in results.of("table 2")}
    speeds = {f: raw(d) / (1 + _table_share(tables[f], d)) for f, d in groups.items()}
    for f, done in groups.items():
        said = claims.TABLE_2.get(f)
        wasted, spent = (said.fragmentation, said.table_share) if said else (None, None)
        yield Row(
            "Table 2", f"internal fragmentation, F = {f}", percent(wasted),
            percent(done.sim.fragmentation), percent(measured.fragmentation.get(f)),
            "One tail block of 16 tokens per request, whatever F is: a unit is cut by tokens and "
            "by layers, so that F changes the number of units, not what they waste.", " %",
        )  # fmt: skip
        yield Row(
            "Table 2", f"page table's share of the time, F = {f}",
            percent(spent), None, percent(_table_share(tables[f], done)),
            "Time measured here over the simulated step. One row per block, one column per group: "
            "numpy handles all groups of a block at once.", " %",
        )  # fmt: skip
        if f in measured.table_shares:
            yield Row(
                "Table 2", f"page table's share of a real server's time, r = 0.5, F = {f}",
                percent(spent), None, percent(measured.table_shares[f]),
                "ellm-sgl bench layer-groups: everything that keeps the books, planning "
                "included, of steps of a small model.", " %",
            )  # fmt: skip
        yield Row(
            "Table 2", f"throughput over F = 8, F = {f}", said.throughput if said else None,
            over(speeds[f], speeds[8]), None,
            "Simulated tokens/s, each step longer by the page table's measured time.", "x",
        )  # fmt: skip


def _table_share(seconds: float, done: Done) -> float:
    return seconds / done.sim.decode_step_s


def _model_error(results: Results) -> Iterator[Row]:
    for case, runs in results.by_case("6.6").items():
        by_error = {d.job.x: d for d in runs}
        exact = by_error[0.0]
        for error, done in by_error.items():
            if error == 0.0:
                continue
            said = claims.MODEL_ERROR[error] if case == CHAT_13B else (None, None)
            for what, claim, figure in zip(("tokens/s", "TTFT"), said, (raw, ttft), strict=True):
                change = over(figure(done), figure(exact))
                yield Row(
                    "§6.6", f"{what} with rates taken for {1 + error:.0%}: {', '.join(case)}",
                    percent(claim), None if change is None else 100 * (change - 1), None,
                    f"Change. Mean TPOT {tpot_ms(done):.0f} ms ({tpot_ms(exact):.0f} exact).", " %",
                )  # fmt: skip
    yield Row(
        "§6.6", "latency model, mean relative error", claims.PREDICTION_ERROR, None,
        results.measured.error("latency_model"),
        "The paper: on a V100. In the simulator the model is the device; on a server: "
        "ellm-sgl calibrate.",
    )  # fmt: skip


def _overheads(results: Results) -> Iterator[Row]:
    timed = results.overheads
    said = {", ".join(case): claims.DECISION_MS[case] for case in CASES}
    for one in timed.decisions:
        claim = said.get(one.name, claims.DECISION_8_MS)
        decision = one.bench.decision
        yield Row(
            "Fig. 16(a)", f"mean decision, {one.solver}: {one.name}", claim, None,
            decision.mean_us / 1e3,
            f"{one.running} running, {one.waiting} waiting; p99 {decision.p99_us / 1e3:.2f} ms "
            "(the paper: 10 ms for 90 %, 21 ms at most).",
            " ms",
        )  # fmt: skip
    look = timed.lookup
    for what, value in (("mean", look.mean_us), ("p90", look.p90_us), ("most", look.most_us)):
        yield Row("Fig. 16(b)", f"one look-up in the page table, {what}", claims.LOOKUP_US[what],
                  None, value, "The paper: below this.", " µs")  # fmt: skip
    split = timed.decisions[0].bench.split.mean_us / 1e3
    yield Row("§6.7", "time to choose l1, l2 and δ", claims.SPLIT_MS, None, split,
              "Arithmetic on a few numbers.", " ms")  # fmt: skip


def _links(results: Results) -> Iterator[Row]:
    """§7: what the interconnect changes."""
    ratio, slo_s = claims.UNCACHED[CHAT_70B], claims.TPOT_SLO_S[CHAT_70B]
    for name, link in ((LARGER, "PCIe"), ("llama2-70b", "NVLink")):
        found = restorable(preset(name), results.settings, CHAT_70B[1], ratio, slo_s)
        yield Row("§7", f"ratio that a step can restore within the SLO, 70B over {link}", None,
                  percent(found.ratio), None, "The paper: more with NVLink. That all-reduces and "
                  "swapping share PCIe is not modelled.", " %")  # fmt: skip
    work = StepWork(claims.RUNNING["ellm"], claims.RUNNING["ellm"] * 895)
    machines = (paper_machine(LARGER), _without_communication(paper_machine("llama2-70b")))
    slow, fast = (float(device_model(m, results.settings).step_seconds(work)) for m in machines)
    yield Row(
        "§7", "communication's share of a 70B decode step, 4 A100 over PCIe",
        percent(claims.COMMUNICATION_SHARE), percent((slow - fast) / slow), None,
        "Two all-reduces a layer, by bytes over PCIe 4. The paper's step takes 502 ms, "
        f"simulated {slow * 1e3:.0f} ms.", " %",
    )  # fmt: skip


def _without_communication(machine: Machine) -> Machine:
    """But for NVLink's all-reduces, which are part of what a step takes whatever its rows."""
    profile, reduces_s = machine.profile, 2 * machine.shape.layers * ALL_REDUCE_S
    profile = replace(profile, step_overhead_s=profile.step_overhead_s - reduces_s)
    return replace(machine, profile=profile)


def _unsimulated() -> Iterator[Row]:
    for each in claims.UNSIMULATED:
        yield Row(each.where, each.what, each.value, None, None, each.why, each.unit)


def _validation(results: Results) -> Iterator[Row]:
    measured = results.measured
    why = "python -m ellm_sgl.eval.validate --json > FILE, then ellm-sgl paper --measured FILE."
    if measured.validated:
        why = f"Over {measured.configurations} configurations: python -m ellm_sgl.eval.validate."
    for name in MEASURES:
        yield Row(
            "simulator", f"MAPE of {name} against a real server", None, None,
            measured.error(name), why,
        )  # fmt: skip
