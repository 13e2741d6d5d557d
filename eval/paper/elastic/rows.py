"""Rows of Figs. 9 to 11 of the paper on elastic memory: said, simulated, measured, and why they
differ. Measured is what host memory brings that takes in prompts, over prompts in chunks: the
server here shrinks its pool for a budget, not for prompts (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ellm_sgl.client.summary import ATTAINMENT
from ellm_sgl.eval.paper.elastic import claims
from ellm_sgl.eval.paper.elastic.claims import CONTEXT, OFFLINE, ONE, ONLINE, PAIR, SMALL
from ellm_sgl.eval.paper.elastic.machines import kv_tokens, machine, most_rows, row_bytes
from ellm_sgl.eval.paper.elastic.plan import APART, MAX_RUNNING, RELATIVE_LOADS, TWICE, lengths
from ellm_sgl.eval.paper.end_to_end import raw, tpot_ms, ttft
from ellm_sgl.eval.paper.jobs import Done
from ellm_sgl.eval.paper.measured import HostMemory
from ellm_sgl.eval.paper.results import Results, by_variant
from ellm_sgl.eval.paper.row import Row, over, percent, times
from ellm_sgl.eval.simulator.machines import DEVICES

PAPER = "elastic memory, "
"""Before figures and sections of it."""
PANELS = {"2k-2k": "9(a)-(d)", "32k-2k": "9(e)-(h)", "sharegpt": "9(i)-(l)"}
MEASURED = "Not measured: no A100 here."


@dataclass(frozen=True)
class Lines:
    """One load, every system along the relative loads."""

    runs: Mapping[str, Sequence[Done]]

    @staticmethod
    def of(done: Sequence[Done], data_set: str) -> Lines:
        return Lines(by_variant([d for d in done if d.job.load.data_set == data_set]))

    def goodput(self, system: str) -> float:
        """Largest relative load up to which `ATTAINMENT` of the requests are within both SLOs; 0:
        not even the lowest."""
        found = 0.0
        for done in self.runs[system]:
            if done.sim.summary.slo_attainment < ATTAINMENT:
                break
            found = done.job.x
        return found

    def most(self, figure: Callable[[Done], float], system: str, ours: str) -> tuple[float, float]:
        """The largest ratio of a system's figure over ours, and the relative load there."""
        pairs = zip(self.runs[system], self.runs[ours], strict=True)
        return max((figure(a) / figure(b), a.job.x) for a, b in pairs)


def rows(results: Results) -> Iterator[Row]:
    """In the figures' order."""
    yield _activations()
    online = {name: Lines.of(results.of("elastic 9"), name) for name in ONLINE}
    for data_set, found in online.items():
        here = results.measured.host_memory if data_set == ONLINE[0] else None
        yield from _latencies(data_set, found, here)
        if data_set == ONLINE[0]:
            yield _twice(results)
        yield from _goodputs(data_set, found)
        yield _output(data_set, found, here)
    yield from _best_goodputs(online)
    yield from _two_devices(Lines.of(results.of("elastic 10"), "1k-512"))
    for data_set in OFFLINE:
        yield from _offline(data_set, results)
    yield from _jamba()


def _activations() -> Row:
    found, tokens = machine(SMALL), CONTEXT[SMALL]
    taken = tokens * row_bytes(found.shape)
    whole = DEVICES["a100-80g"].memory_bytes
    return Row(
        PAPER + "Fig. 1(a)", "activations of the longest prefill, of memory: Llama3-8B-262K, A100",
        percent(claims.ACTIVATION_SHARE), percent(taken / whole), None,
        f"Above that. {tokens:,} rows of {row_bytes(found.shape) / 1e3:.0f} kB, {taken / 1e9:.1f} "
        f"GB: vLLM's split leaves {kv_tokens(SMALL, 'vllm'):,} tokens of KV, chunks of "
        f"{claims.CHUNK} leave {kv_tokens(SMALL, 'vllm-cp'):,}. This is what Figs. 9 and 11 are "
        "about.", " %",
    )  # fmt: skip


def _latencies(data_set: str, found: Lines, here: HostMemory | None) -> Iterator[Row]:
    where = f"{PAPER}Fig. {PANELS[data_set]}"
    for system in ("vllm", "vllm-cp"):
        ratio, x = found.most(ttft, system, "ellm")
        taken_in = here if system == "vllm-cp" else None
        there = {name: ttft(next(d for d in line if d.job.x == x))
                 for name, line in found.runs.items()}  # fmt: skip
        yield Row(
            where, f"mean TTFT of {system} over eLLM's, at the most: {data_set}",
            claims.TTFT[system] if data_set == ONLINE[0] else None, ratio,
            None if taken_in is None else over(1.0, taken_in.ttft),
            f"At {x:g} times what vLLM's split serves: {_listed(there)} s"
            f"{_whole_host(system, found)}. The ratio of two queues: it depends on how many "
            f"requests come. {_measured(taken_in)}", "x",
        )  # fmt: skip
    last = {name: tpot_ms(line[-1]) for name, line in found.runs.items()}
    slo = found.runs["ellm"][-1].job.load.tpot_slo_s
    yield Row(
        where, f"mean TPOT of eLLM over vLLM's, at the highest load: {data_set}",
        None, over(last["ellm"], last["vllm"]), None,
        f"The paper: higher, within the SLO. {_listed(last)} ms; the SLO, {claims.SLO_SCALE:g} "
        f"times a request alone, is {1e3 * slo:.0f} ms.", "x",
    )  # fmt: skip


def _measured(here: HostMemory | None) -> str:
    if here is None:
        return MEASURED
    return (
        "Measured on real servers (a CPU, the demo model, ellm-sgl bench rotation): host memory "
        f"that takes in prompts, {times(here.under_way)} the requests under way."
    )


def _whole_host(system: str, found: Lines) -> str:
    if "host" not in found.runs:
        return ""
    ratio, x = found.most(ttft, system, "host")
    return f"; over host, all of host memory without Alg. 2, {times(ratio)}, at {x:g}"


def _listed(figures: Mapping[str, float]) -> str:
    shown = {n: f"{v:.3g}" if v < 1000 else f"{v:,.0f}" for n, v in figures.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _twice(results: Results) -> Row:
    first = Lines.of(results.of("elastic 9"), ONLINE[0]).runs
    once, twice = (
        {name: next(d for d in line if d.job.x == TWICE) for name, line in runs.items()}
        for runs in (first, by_variant(results.of("elastic 9, twice")))
    )
    count = once["vllm"].sim.summary.requests
    before = over(ttft(once["vllm"]), ttft(once["ellm"]))
    return Row(
        f"{PAPER}Fig. {PANELS[ONLINE[0]]}",
        f"mean TTFT of vllm over eLLM's at {TWICE:g}, with twice the requests: {ONLINE[0]}",
        None, over(ttft(twice["vllm"]), ttft(twice["ellm"])), None,
        f"{times(before)} with {count} requests. Beyond what a system serves its queue, and so its "
        f"TTFT, grows as long as requests come: vLLM {ttft(once['vllm']):.3g} and "
        f"{ttft(twice['vllm']):.3g} s. The paper does not say how many it sends; a ratio of such "
        "TTFTs says which queues had begun to grow by the end.", "x",
    )  # fmt: skip


def _goodputs(data_set: str, found: Lines) -> Iterator[Row]:
    good = {name: found.goodput(name) for name in found.runs}
    for system in ("vllm", "vllm-cp"):
        yield Row(
            f"{PAPER}Fig. {PANELS[data_set]}", f"goodput of eLLM over {system}: {data_set}",
            None, over(good["ellm"], good[system]), None, _up_to(good) + _small(data_set), "x",
        )  # fmt: skip


def _up_to(good: Mapping[str, float]) -> str:
    return (
        f"{ATTAINMENT:.0%} within both SLOs up to a relative load of {_listed(good)} (0: not at "
        f"{RELATIVE_LOADS[0]:g}; {RELATIVE_LOADS[-1]:g} is the highest)."
    )


def _small(data_set: str) -> str:
    if data_set in claims.FIXED:
        return ""
    return f" Beside all of memory, vLLM's bound of {MAX_RUNNING} requests holds first."


def _output(data_set: str, found: Lines, here: HostMemory | None) -> Row:
    last = {name: line[-1] for name, line in found.runs.items()}
    speeds = {name: raw(done) for name, done in last.items()}
    batch = {name: done.sim.running_mean for name, done in last.items()}
    return Row(
        f"{PAPER}Fig. {PANELS[data_set]}",
        f"output tokens/s of eLLM over vLLM's, at the highest load: {data_set}",
        claims.OUTPUT if data_set == ONLINE[0] else None,
        over(speeds["ellm"], speeds["vllm"]), None if here is None else here.tokens_per_s,
        f"{_listed(speeds)} tokens/s, with {_listed(batch)} requests that decode together, whose "
        f"KV every step has to read.{_small(data_set)}"
        + ("" if here is None else " Measured: as TTFT, over vllm-cp's way."), "x",
    )  # fmt: skip


def _best_goodputs(online: Mapping[str, Lines]) -> Iterator[Row]:
    for system in ("vllm", "vllm-cp"):
        gains, whole = (
            {
                name: over(found.goodput(ours), found.goodput(system))
                for name, found in online.items()
                if ours in found.runs
            }
            for ours in ("ellm", "host")
        )
        known = [gain for gain in gains.values() if gain is not None]
        yield Row(
            PAPER + "§6.2", f"goodput of eLLM over {system}, the most of the three loads",
            claims.GOODPUT[system], max(known, default=None), None,
            f"{_gains(gains)}; with all of host memory from the start, without Alg. 2, "
            f"{_gains(whole)}. What host memory adds lasts as long as it takes in prompts: their "
            "first tokens come, and they wait behind them, which the TPOT SLO has room for.", "x",
        )  # fmt: skip


def _gains(gains: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {times(gain)}" for name, gain in gains.items())


def _two_devices(found: Lines) -> Iterator[Row]:
    good = {name: found.goodput(name) for name in found.runs}
    last = {name: line[-1] for name, line in found.runs.items()}
    pair, left = machine(PAIR), kv_tokens(ONE, APART) / kv_tokens(PAIR, "vllm")
    taken = most_rows(PAIR, "vllm") * row_bytes(pair.shape)
    for system in ("vllm", "vllm-cp", APART):
        why = {
            "vllm": f"Activations of {most_rows(PAIR, 'vllm'):,} rows take {taken / 1e9:.2f} GB of "
            "48 on each device: sharing them changes nothing, and what eLLM gains is host memory.",
            "vllm-cp": "As over vLLM.",
            APART: f"Two copies of the weights leave {left:.0%} of the KV. That of prompts "
            "that wait between the instances takes no room here; fetching it blocks decoding.",
        }[system]
        yield Row(
            PAPER + "Fig. 10", f"goodput of eLLM over {system}: OPT-13B, 2 L40S", None,
            over(good["ellm"], good[system]), None,
            f"The paper: eLLM the highest, {APART} the lowest. {_up_to(good)} {why}", "x",
        )  # fmt: skip
        yield Row(
            PAPER + "Fig. 10",
            f"output tokens/s of eLLM over {system}, at the highest load: OPT-13B, 2 L40S", None,
            over(raw(last["ellm"]), raw(last[system])), None,
            f"{_listed({name: raw(done) for name, done in last.items()})} tokens/s.", "x",
        )  # fmt: skip


def _offline(data_set: str, results: Results) -> Iterator[Row]:
    runs = {n: d for n, (d,) in Lines.of(results.of("elastic 11"), data_set).runs.items()}
    prompt, output = lengths(data_set)
    each = f"{prompt:g} + {output:g} tokens"
    for what, figure, said in (
        ("total tokens/s", total, None),
        ("decode tokens/s", decode, None),
        ("largest batch", largest, claims.BATCH if data_set == OFFLINE[-1] else None),
    ):
        why = _listed({name: figure(done) for name, done in runs.items()})
        yield Row(
            PAPER + "Fig. 11", f"{what} of eLLM over vLLM's, all at once: Llama3-8B, {data_set}",
            said, over(figure(runs["host"]), figure(runs["vllm"])), None,
            f"{each}: {why} (intra: without host memory; host: with it, for whatever finds no "
            f"room). {_offline_note(runs, figure)}", "x",
        )  # fmt: skip


def _offline_note(runs: Mapping[str, Done], figure: Callable[[Done], float]) -> str:
    gain = over(figure(runs["vllm-cp"]), figure(runs["vllm"]))
    return (
        f"Chunks of {claims.CHUNK}, which the figure leaves out, in whose steps others decode: "
        f"{times(gain)} vLLM's."
    )


def total(done: Done) -> float:
    """Prompt and output tokens per second."""
    load, summary = done.job.load, done.sim.summary
    prompt, output = lengths(load.data_set)
    return summary.requests * (prompt + output) / summary.seconds


def decode(done: Done) -> float:
    """Tokens per second of decode steps."""
    return done.sim.decode_tokens_per_s


def largest(done: Done) -> float:
    """Requests that decode together, at the most."""
    return float(done.sim.running_most)


def _jamba() -> Iterator[Row]:
    for what, said in claims.JAMBA.items():
        yield Row(
            PAPER + "Fig. 11", f"{what} of eLLM over vLLM's: Jamba-Mini, 2 A100, 128k-8k", said,
            None, None, "Not simulated: the latency models know transformers, not Mamba's layers, "
            "and the activations of these are not given.", "x",
        )  # fmt: skip
