"""The table: what the paper said, what the simulator says, what was measured here, and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ellm_sgl.eval.paper import claims
from ellm_sgl.eval.paper.plan import MODEL
from ellm_sgl.eval.paper.results import BASELINES, Comparison, Results
from ellm_sgl.eval.validate.results import MEASURES

UNKNOWN = "not available here"


@dataclass(frozen=True)
class Row:
    """One figure of the paper's beside ours."""

    where: str
    quantity: str
    paper: float | None = None
    simulated: float | None = None
    measured: float | None = None
    why: str = ""
    unit: str = ""

    def cell(self, value: float | None) -> str:
        return UNKNOWN if value is None else f"{value:.3g}{self.unit}"

    def ratio(self, value: float | None) -> str:
        """Ours over the paper's."""
        if value is None or not self.paper:
            return ""
        return f"{value / self.paper:.2f}"


def rows(results: Results) -> list[Row]:
    """The whole table."""
    return [
        *_gains(results),
        *_attainment(results),
        *_running(results),
        *_fused(results),
        *_decisions(results),
        *_table_2(results),
        *_model_error(results),
        *_goodput(results),
        *_validation(results),
    ]


def _gains(results: Results) -> Iterator[Row]:
    ceilings = {b.machine: b for b in results.bounds}
    for compared in results.comparisons():
        bound = ceilings[compared.runs[0].job.machine]
        where, load = "Figs. 10, 12", compared.load
        best = min(compared.gains, key=compared.gains.__getitem__)
        refused = ""
        if compared.refused:
            refused = f" The baselines refuse {compared.refused} requests larger than the device."
        yield Row(
            where, f"tokens/s over the best baseline ({best}): {load}", claims.THROUGHPUT_GAIN,
            compared.gains[best], None,
            f"Ceiling by the latency model: {bound.throughput_ceiling:.2f}x over a full memory, "
            f"were restoration free: only the {bound.fixed_s / bound.step_s:.0%} of a step that "
            "reads weights can be shared by more requests, and every further request's KV still "
            f"has to be read. Free per step: {bound.free_swap:.1%} of memory by swapping, "
            f"{bound.free_recompute:.2%} by recomputation.{refused}",
            "x",
        )  # fmt: skip
        worst = max(compared.gains, key=compared.gains.__getitem__)
        yield Row(
            where, f"tokens/s over the worst baseline ({worst}): {load}", claims.THROUGHPUT_GAIN,
            compared.gains[worst], None, _why_worst(compared, worst), "x",
        )  # fmt: skip
        slowest = max(compared.ttft_gains, key=compared.ttft_gains.__getitem__)
        yield Row(
            where, f"TTFT of {slowest} over eLLM's: {load}", claims.TTFT_GAIN,
            compared.ttft_gains[slowest], None,
            "At the paper's arrival rate nearly all of TTFT is time in the queue, which falls as "
            "throughput rises, and no faster.", "x",
        )  # fmt: skip
    for gain in results.measured.gains:
        where, how = "Figs. 10, 12", "Real servers: ellm-sgl compare."
        yield Row(
            where, f"tokens/s over the best baseline ({gain.best}): {gain.load}",
            claims.THROUGHPUT_GAIN, None, gain.tokens_per_s, how, "x",
        )  # fmt: skip
        yield Row(
            where, f"TTFT of {gain.best} over eLLM's: {gain.load}",
            claims.TTFT_GAIN, None, gain.ttft, how, "x",
        )  # fmt: skip


def _attainment(results: Results) -> Iterator[Row]:
    for compared in results.comparisons():
        for mode in ("ellm", *BASELINES):
            summary = compared.best(mode).sim.summary
            yield Row(
                "Figs. 10, 12", f"requests within both SLOs, {mode}: {compared.load}", None,
                100 * summary.slo_attainment, None,
                "SLOs are this report's own; at the paper's arrival rate most requests wait "
                "longer than any TTFT SLO.", " %",
            )  # fmt: skip


def _why_worst(compared: Comparison, worst: str) -> str:
    run = compared.best(worst).sim
    again = max(run.recomputed_prompt_share, 0.0)
    return (
        f"It lost {run.retractions} requests' places, prefilled {again:.0%} of the prompt tokens "
        f"again, and decoded {run.running_mean:.0f} requests at a time "
        f"(eLLM {compared.best('ellm').sim.running_mean:.0f})."
    )


def _running(results: Results) -> Iterator[Row]:
    for compared in results.comparisons():
        ours = compared.best("ellm").sim.running_mean
        theirs = compared.best("recompute").sim.running_mean
        yield Row(
            "Fig. 11", f"running requests, eLLM over recompute: {compared.load}", None,
            ours / theirs if theirs else None, None,
            "Both admit by SGLang's accounting; eLLM goes beyond it by what it may restore.", "x",
        )  # fmt: skip


def _fused(results: Results) -> Iterator[Row]:
    for bound in results.bounds:
        yield Row(
            "fused step", f"TPOT, one pass over two, r = {claims.FUSED_RATIO}: {bound.machine}",
            claims.FUSED_TPOT, bound.fused_tpot, None,
            "Fusion saves one reading of the weights; that the computing also hides reading KV is "
            "not modelled. At r = 0.4 of a full memory a step computes "
            f"for {bound.requests} requests' spans, which dwarfs it; the saving is largest for "
            "small spans.", "x",
        )  # fmt: skip
    for load, ratio in results.measured.fused.items():
        yield Row(
            "fused step", f"step time, one pass over two, r = {claims.FUSED_RATIO}: {load}",
            claims.FUSED_TPOT, None, ratio,
            "Real servers, ellm-sgl bench fusion: on a CPU the rows, not the weights, are "
            "what a step takes time for.", "x",
        )  # fmt: skip


def _decisions(results: Results) -> Iterator[Row]:
    for name, bench in results.decisions.items():
        yield Row(
            "Fig. 16", f"mean decision time of {name}", claims.DECISION_MS[0], None,
            bench.decision.mean_us / 1e3,
            f"256 running, 1,024 waiting. The paper: {claims.DECISION_MS[0]} to "
            f"{claims.DECISION_MS[1]} ms. Closed forms where the paper calls a solver.", " ms",
        )  # fmt: skip
    bench = next(iter(results.decisions.values()))
    yield Row(
        "Fig. 16", "time to choose l1, l2 and δ", claims.SPLIT_MS, None,
        bench.split.mean_us / 1e3, "Arithmetic on a few numbers.", " ms",
    )  # fmt: skip


def _table_2(results: Results) -> Iterator[Row]:
    measured = results.measured
    for done in results.of("table 2"):
        group = round(done.job.x)
        fragmentation, share = claims.TABLE_2.get(group, (None, None))
        yield Row(
            "Table 2", f"internal fragmentation, F = {group}",
            _percent(fragmentation),
            100 * done.sim.fragmentation, _percent(measured.fragmentation.get(group)),
            "One tail block of 16 tokens per request, whatever F is: a unit is cut by tokens and "
            "by layers, so that F changes the number of units, not what they waste.", " %",
        )  # fmt: skip
        yield Row(
            "Table 2", f"page table's share of a step, F = {group}",
            _percent(share), None,
            100 * results.table_seconds[group] / done.sim.decode_step_s,
            "Time measured here over the simulated step. One row per block, one column per group: "
            "numpy handles all groups of a block at once.", " %",
        )  # fmt: skip
        if group in measured.table_shares:
            yield Row(
                "Table 2", f"page table's share of a real server's time, r = 0.5, F = {group}",
                _percent(share), None,
                100 * measured.table_shares[group],
                "ellm-sgl bench layer-groups: everything that keeps the books, planning "
                "included, of steps of a small model.", " %",
            )  # fmt: skip
        yield Row("Table 2", f"tokens/s, F = {group}", None, done.sim.summary.tokens_per_s, None,
                  "F decides how much of a block an eviction takes.", "")  # fmt: skip


def _model_error(results: Results) -> Iterator[Row]:
    for machine, group in results.variants("6.6").items():
        exact = next(d for d in group if d.job.x == 0).sim.summary
        for done in (group[0], group[-1]):
            yield Row(
                "§6.6", f"tokens/s with a model error of {done.job.x:+.0%}: {machine}", None,
                done.sim.summary.tokens_per_s / exact.tokens_per_s, None,
                "Over those with an exact model. p99 TPOT "
                f"{done.sim.summary.tpot.p99 * 1e3:.0f} ms (exact: "
                f"{exact.tpot.p99 * 1e3:.0f} ms; SLO "
                f"{done.job.settings.tpot_slo_s * 1e3:.0f} ms).", "x",
            )  # fmt: skip


def _goodput(results: Results) -> Iterator[Row]:
    found = results.goodputs
    for name, rate in found.items():
        if name != "ellm":
            yield Row(
                "Figs. 14-15", f"goodput of eLLM over {name}: {MODEL}", None,
                found["ellm"] / rate if rate else None, None,
                f"{found['ellm']:.2f} against {rate:.2f} requests/s, each found to within 5 %; "
                "SLOs are this report's own.",
                "x",
            )  # fmt: skip
    if gains := results.measured.goodput_gains:
        yield Row(
            "Figs. 14-15", "goodput of eLLM over stock SGLang, median of the seeds", None, None,
            statistics.median(gains), "Real servers: ellm-sgl bench load-sweep.", "x",
        )  # fmt: skip


def _validation(results: Results) -> Iterator[Row]:
    measured = results.measured
    yield Row(
        "latency model", "mean relative error", claims.PREDICTION_ERROR, None,
        measured.error("latency_model"),
        "In the simulator the model is the device. On a server: ellm-sgl calibrate.",
    )  # fmt: skip
    why = "python -m ellm_sgl.eval.validate --json > FILE, then ellm-sgl paper --measured FILE."
    if measured.validated:
        why = f"Over {measured.configurations} configurations: python -m ellm_sgl.eval.validate."
    for name in MEASURES:
        yield Row(
            "simulator", f"MAPE of {name} against a real server", None, None,
            measured.error(name), why,
        )  # fmt: skip


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
