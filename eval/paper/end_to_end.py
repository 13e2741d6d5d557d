"""Rows of Figs. 10 to 12, 14 and 15: whole servers under load."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from ellm_sgl.eval.paper import claims
from ellm_sgl.eval.paper.bounds import Bounds
from ellm_sgl.eval.paper.claims import CHAT_70B
from ellm_sgl.eval.paper.jobs import Done
from ellm_sgl.eval.paper.plan import ADMISSIONS, BASELINES
from ellm_sgl.eval.paper.results import Comparison, Results, Sweep
from ellm_sgl.eval.paper.row import Row, over, percent, times

Figure = Callable[[Done], float]
MODES = ("ellm", *BASELINES)
WHERE = {"sharegpt": "Fig. 10", "l-eval": "Fig. 12"}
UP_TO = " The paper: up to, over both models."


def within_slo(done: Done) -> float:
    return done.sim.summary.slo_tokens_per_s


def raw(done: Done) -> float:
    return done.sim.summary.tokens_per_s


def steady(done: Done) -> float:
    return done.sim.summary.steady_tokens_per_s


def ttft(done: Done) -> float:
    return done.sim.summary.ttft.mean


def tpot_ms(done: Done) -> float:
    return done.sim.summary.tpot.mean * 1e3


def attainment(done: Done) -> float:
    return done.sim.summary.tpot_attainment


def end_to_end(results: Results) -> Iterator[Row]:
    """Figs. 10 to 12."""
    ceilings = {b.machine: b for b in results.bounds}
    for compared in results.comparisons():
        yield from _throughput(compared, ceilings[compared.case[0]])
        yield from _ttft(compared)
        yield from _attainment(compared)
        yield from _tpot(compared)
        yield from _uncached(compared)
        if compared.case == CHAT_70B:
            yield from _running(compared)
    yield from _real_servers(results)


def _in_the_abstract(compared: Comparison) -> str:
    return f"Abstract, {WHERE[compared.case[1]]}"


def _throughput(compared: Comparison, bound: Bounds) -> Iterator[Row]:
    ours = compared.baseline("ellm")
    where, up_to = _in_the_abstract(compared), UP_TO if compared.case[1] == "l-eval" else ""
    for mode in BASELINES:
        said = claims.THROUGHPUT.get(compared.case, {}).get(mode)
        theirs = compared.baseline(mode)
        others = "; ".join(
            f"{admission}: {times(over(within_slo(ours), within_slo(other)))} within the SLO, "
            f"{times(over(raw(ours), raw(other)))} raw"
            for admission in ADMISSIONS[1:]
            for other in [compared.baseline(mode, admission)]
        )
        yield Row(
            where, f"tokens/s within the TPOT SLO, eLLM over {mode}: {compared.load}", said,
            over(within_slo(ours), within_slo(theirs)), None,
            f"Raw {times(over(raw(ours), raw(theirs)))}, before the drain tail "
            f"{times(over(steady(ours), steady(theirs)))}. Baseline with another admission: "
            f"{others}.{up_to}", "x",
        )  # fmt: skip
    printed = compared.best("ellm, as printed")
    yield Row(
        where, f"tokens/s within the TPOT SLO, eLLM: {compared.load}", None, within_slo(ours), None,
        f"Raw {raw(ours):.4g}, before the drain tail {steady(ours):.4g}; "
        f"{ours.sim.summary.requests} requests. As printed (current lengths, next step, no "
        f"pauses): {within_slo(printed):.4g}, raw {raw(printed):.4g}. Ceiling of any policy: "
        f"{bound.throughput_ceiling:.2f}x a full memory, were restoring free.",
    )  # fmt: skip


def _ttft(compared: Comparison) -> Iterator[Row]:
    for mode in BASELINES:
        yield Row(
            _in_the_abstract(compared), f"mean TTFT of {mode} over eLLM's: {compared.load}",
            claims.TTFT.get(compared.case, {}).get(mode),
            over(ttft(compared.baseline(mode)), ttft(compared.baseline("ellm"))), None,
            "At the stated rates nearly all of TTFT is time in the queue, which falls as raw "
            "tokens/s rise, and no faster.", "x",
        )  # fmt: skip


def _attainment(compared: Comparison) -> Iterator[Row]:
    for mode in MODES:
        said = claims.ATTAINMENT.get(compared.case, {}).get(mode)
        yield Row(
            WHERE[compared.case[1]], f"requests within the TPOT SLO, {mode}: {compared.load}",
            percent(said), percent(attainment(compared.baseline(mode))), None,
            _by_admission(compared, mode, attainment, "{:.0%}"), " %",
        )  # fmt: skip


def _tpot(compared: Comparison) -> Iterator[Row]:
    for mode, said in claims.TPOT_MS.get(compared.case, {}).items():
        yield Row(
            "§6.2", f"mean TPOT, {mode}: {compared.load}", said,
            tpot_ms(compared.baseline(mode)), None,
            _by_admission(compared, mode, tpot_ms, "{:.0f} ms"), " ms",
        )  # fmt: skip


def _by_admission(compared: Comparison, mode: str, figure: Figure, form: str) -> str:
    if mode == "ellm":
        return ""
    others = (f"{a}: {form.format(figure(compared.baseline(mode, a)))}" for a in ADMISSIONS[1:])
    return f"With another admission, {', '.join(others)}."


def _uncached(compared: Comparison) -> Iterator[Row]:
    said = claims.UNCACHED.get(compared.case)
    if said is not None:
        printed = compared.best("ellm, as printed")
        yield Row(
            "§6.2", f"uncached ratio r of eLLM, mean: {compared.load}", percent(said),
            percent(compared.baseline("ellm").sim.uncached_share), None,
            f"As printed: {printed.sim.uncached_share:.1%}. Restoring more does not keep the SLO: "
            "see the contradictions.", " %",
        )  # fmt: skip


def _running(compared: Comparison) -> Iterator[Row]:
    for mode, said in claims.RUNNING.items():
        yield Row(
            "Fig. 11(a)", f"requests that run together, {mode}: {compared.load}", said,
            compared.baseline(mode).sim.running_mean, None,
            _by_admission(compared, mode, lambda d: d.sim.running_mean, "{:.0f}"),
        )  # fmt: skip
    most = compared.baseline("ellm").sim.running_most
    yield Row("Fig. 11(a)", f"most requests that run together, ellm: {compared.load}",
              claims.MOST_RUNNING, most)  # fmt: skip


def _real_servers(results: Results) -> Iterator[Row]:
    for gain in results.measured.gains:
        yield Row(
            "Abstract, Figs. 10, 12",
            f"tokens/s within the SLO over the best baseline ({gain.best}): {gain.load}",
            None, None, gain.slo_tokens_per_s, "Real servers: ellm-sgl compare.", "x",
        )  # fmt: skip
        yield Row(
            "Abstract, Figs. 10, 12", f"TTFT of {gain.best} over eLLM's: {gain.load}",
            None, None, gain.ttft, "Real servers: ellm-sgl compare.", "x",
        )  # fmt: skip


def under_load(results: Results) -> Iterator[Row]:
    """Figs. 14 and 15."""
    sweeps = {(s.case, s.mode): s for s in results.sweeps()}
    for (case, mode), sweep in sweeps.items():
        yield Row(
            "Fig. 14", f"relative load up to which TTFT is steady, {mode}: {', '.join(case)}",
            claims.KNEE[case].get(mode), sweep.knee, None,
            f"Mean TTFT within twice that at {sweep.runs[0].job.x:g}; "
            f"{sweep.runs[0].sim.summary.requests} requests a load.", "x",
        )  # fmt: skip
        if mode in BASELINES:
            yield _goodput(sweeps[case, "ellm"], sweep)
    for (case, mode), sweep in sweeps.items():
        if mode == "ellm":
            yield from _at_the_knee(sweep, [sweeps[case, mode] for mode in BASELINES])
    if goodputs := results.measured.goodputs:
        gains = [over(ours, theirs) for ours, theirs in goodputs]
        known = [gain for gain in gains if gain is not None]
        zero = gains.count(None)
        none = f" In {zero} of {len(gains)} seeds stock's is 0." if zero else ""
        yield Row(
            "Fig. 15", "goodput of eLLM over stock SGLang, median of the seeds", None, None,
            None if none else statistics.median(known),
            f"Real servers: ellm-sgl bench load-sweep.{none}", "x",
        )  # fmt: skip


def _at_the_knee(ours: Sweep, theirs: Sequence[Sweep]) -> Iterator[Row]:
    """And beyond."""
    model, best = ", ".join(ours.case), max(sweep.knee for sweep in theirs)
    if (said := claims.REQUEST_THROUGHPUT.get(ours.case)) is not None:
        yield Row(
            "§6.4", f"request throughput over the best baseline's: {model}", said,
            over(ours.knee, best), None, "Of the loads up to which TTFT is steady.", "x",
        )  # fmt: skip
    if (percents := claims.WITHIN_AT_MOST_LOAD.get(ours.case)) is not None:
        yield Row(
            "§6.4", f"requests within the TPOT SLO at {ours.runs[-1].job.x:g} x, ellm: {model}",
            percents, percent(attainment(ours.runs[-1])), None, "", " %",
        )  # fmt: skip


def _goodput(ours: Sweep, theirs: Sweep) -> Row:
    return Row(
        "Fig. 15", f"goodput of eLLM over {theirs.mode}: {', '.join(theirs.case)}",
        claims.GOODPUT[theirs.case][theirs.mode], over(ours.goodput, theirs.goodput), None,
        f"90 % within the TPOT SLO up to {ours.goodput:g} and {theirs.goodput:g} of relative load "
        f"(0: not at the lowest; {claims.RELATIVE_LOADS[-1]:g} is the highest). Who waits in the "
        "queue misses no TPOT SLO.", "x",
    )  # fmt: skip
