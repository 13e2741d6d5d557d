"""The report of `ellm-sgl paper`: one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from ellm_sgl import __version__
from ellm_sgl.eval.paper import plots
from ellm_sgl.eval.paper.bounds import TOKENS
from ellm_sgl.eval.paper.claims import CHAT_13B, TPOT_SLO_S
from ellm_sgl.eval.paper.contradictions import contradictions
from ellm_sgl.eval.paper.elastic.contradictions import contradictions as elastic_contradictions
from ellm_sgl.eval.paper.plan import EAGER, SLO_SCALE, unit_rates
from ellm_sgl.eval.paper.results import Results, by_data_set, by_variant
from ellm_sgl.eval.paper.row import Row
from ellm_sgl.eval.paper.table import rows

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } th, td { border: 1px solid #ccc;
padding: .3rem .5rem; text-align: left; vertical-align: top } th { background: #f3f3f3 }
td.n { text-align: right; white-space: nowrap } figure { margin: 1.5rem 0 }
figcaption { color: #444; font-size: 13px } svg { max-width: 100%; height: auto }
"""


def render(results: Results) -> str:
    """The HTML document."""
    body = "\n".join(
        [
            _introduction(results),
            _table(rows(results)),
            _contradictions(results),
            *_figures(results),
            _limits(),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>The eLLM paper's evaluation, simulated</title><style>{STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _introduction(results: Results) -> str:
    bound = "".join(
        f"<li>{b.machine}: {b.requests} requests of {TOKENS} tokens fill memory; step "
        f"{b.step_s * 1e3:.1f} ms, of which {b.fixed_s * 1e3:.1f} ms do not depend on them; "
        f"ceiling of any policy's throughput {b.throughput_ceiling:.2f}x; free per step "
        f"{b.free_swap:.1%} of memory by swapping, {b.free_recompute:.2%} by recomputation.</li>"
        for b in results.bounds
    )
    size = "" if results.scale == 1 else f" Run at {results.scale:g} of the full request counts."
    return f"""<h1>The eLLM paper's evaluation, simulated</h1>
<p>Written by <code>ellm-sgl paper</code> {__version__} on {datetime.now(UTC):%d %B %Y}. Figures of
the paper (EuroSys'26) stand beside what this project's simulator gives for the same load and what
was measured on the machine that wrote this. Nothing was adjusted to come out alike. The simulator
runs the server's own policies, control loop and page table; its device is the
<b>{results.latency_model}</b> latency model.{size}</p>
<h2>What bounds a gain</h2><ul>{bound}</ul>
<p>At the end of the table: Figs. 9 to 11 of another paper, on elastic memory ("eLLM: Elastic Memory
Management Framework"), likewise.</p>
<p>Where a ratio below is far from 1, this is why: more requests at once share only the reading of
the weights. Each further request's KV has to be read like any other's, and restored first.</p>"""


def _table(found: Sequence[Row]) -> str:
    def line(row: Row) -> str:
        ours = (f(v) for v in (row.simulated, row.measured) for f in (row.cell, row.ratio))
        figures = "".join(f'<td class="n">{text}</td>' for text in (row.cell(row.paper), *ours))
        where, quantity, why = map(html.escape, (row.where, row.quantity, row.why))
        return f"<tr><td>{where}</td><td>{quantity}</td>{figures}<td>{why}</td></tr>"

    return (
        "<h2>Paper, simulated, measured</h2><table><thead><tr><th>where</th><th>what</th>"
        "<th>paper said</th><th>simulated</th><th>/ paper</th><th>measured here</th>"
        "<th>/ paper</th><th>why it differs, or how it was taken</th></tr></thead><tbody>"
        + "".join(map(line, found))
        + "</tbody></table>"
    )


def _contradictions(results: Results) -> str:
    lines = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(t)}</td>" for t in (c.where, c.said, c.against))
        + "</tr>"
        for c in (*contradictions(results.settings), *elastic_contradictions(results.settings))
    )
    return (
        "<h2>Where the papers' figures do not fit together</h2><table><thead><tr><th>where</th>"
        f"<th>said</th><th>against it</th></tr></thead><tbody>{lines}</tbody></table>"
    )


def _figures(results: Results) -> Iterator[str]:
    yield "<h2>Figures</h2>"
    yield _plot(
        plots.lines(by_variant(results.of("4")), "target uncached ratio r", *plots.LATENCIES),
        f"Figs. 3(b) and 4. {', '.join(CHAT_13B)}: the same uncached ratio for every request, "
        "restored by recomputation or by the faster mix with swapping; beside it whole requests, "
        "recomputed or swapped.",
    )
    yield _plot(
        plots.examples(),
        "Fig. 7. Two requests, the first block of each uncached: units of logical blocks (green) "
        "and the transient units that restoring takes (orange).",
    )
    for compared in results.comparisons():
        yield _plot(
            plots.comparison(compared),
            f"Figs. 10 and 12. {compared.load}, the paper's arrivals. Baselines by admission: "
            "paper is vLLM's with Eq. (5)'s cap; SGLang's at the better of conservativeness 1 and "
            f"{EAGER:g}.",
        )
        yield _plot(
            plots.running(compared),
            f"Fig. 11. {compared.load}: requests that decode together, baselines with the paper's "
            "admission, and how much of them eLLM restores.",
        )
    for case, group in results.by_case("13").items():
        yield _plot(
            plots.runs([d.job.variant for d in group], group, *plots.PARTS),
            f"Fig. 13. {', '.join(case)}: eLLM with parts left out or others in their place.",
        )
    rates = unit_rates(results.latency_model)
    for case, group in results.by_case("14").items():
        yield _plot(
            plots.lines(by_variant(group), "relative load", "output tokens/s", "mean TTFT, s",
                        "within the TPOT SLO, %"),
            f"Figs. 14 and 15. {', '.join(case)}: load sweep, baselines with the paper's "
            f"admission. Relative load 1 is {rates[case]:.2g} requests/s, half of what the machine "
            "serves.",
        )  # fmt: skip
    yield _plot(
        plots.decisions(results),
        "Fig. 16. Time to decide, measured here, by the default solver and the paper's.",
    )
    for case, group in results.by_case("6.6").items():
        yield _plot(
            plots.lines(by_variant(group), "error of the policy's FLOP/s and bandwidth (share)",
                        "output tokens/s", "mean TTFT, s", "p99 TPOT, ms"),
            f"§6.6. {', '.join(case)}: the policy's model is wrong by 20 %, and does not learn.",
        )  # fmt: skip
    yield from _elastic(results)


def _elastic(results: Results) -> Iterator[str]:
    """Figs. 9 to 11 of the paper on elastic memory."""
    panels = ("mean TTFT, s", "mean TPOT, ms", "within both SLOs, %", "output tokens/s")
    for figure in ("elastic 9", "elastic 10"):
        for data_set, group in by_data_set(results.of(figure)).items():
            yield _plot(
                plots.lines(by_variant(group), "relative load", *panels),
                f"Fig. {figure[8:]} of the paper on elastic memory. {group[0].job.machine}, "
                f"{data_set}: vLLM, with chunked prefill (CP), and eLLM with parts of it (intra: "
                "KV and activations share memory; host: prompts' KV may go to host memory, too; "
                "ellm: as much of it as Alg. 2 allows). Relative load 1 is what vLLM's split "
                "serves.",
            )
    yield _plot(
        plots.offline(results.of("elastic 11")),
        "Fig. 11 of the paper on elastic memory. Llama3-8B on an A100, all at once; over vLLM.",
    )


def _plot(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _limits() -> str:
    slos = ", ".join(f"{', '.join(case)} {slo * 1e3:.0f} ms" for case, slo in TPOT_SLO_S.items())
    return f"""<h2>What is assumed, and what the simulation leaves out</h2><ul>
<li>TPOT SLOs are Table 1's: {slos}; on llama3-8b, which is not the paper's, {SLO_SCALE:g} times the
step of a full memory. There is no TTFT SLO, as in the paper.</li>
<li>Output lengths are unknown to the servers: requests say they may generate 4,096 tokens
(ShareGPT) or 16,384 (L-Eval). Lengths are log-normal with the paper's means; their spread is an
assumption (ShareGPT: sigma 1, L-Eval: 0.5). ShareGPT requests end with Llama-2's context of 4,096
tokens; L-Eval's are many times longer, and are served as if the model took them. Of these those
are left out that are larger than the device: no server of whole requests takes them.</li>
<li>Arrivals have Gamma gaps with the deviation of the Azure trace and the rates stated: 50 a second
for ShareGPT, 12.5 for L-Eval.</li>
<li>There is no prefix cache, and copying to host memory costs no time. Host memory is bounded:
40 GB for 13B, 160 GB for 70B. Without NVLink each all-reduce sends its bytes over PCIe 4,
beside which swapping does not slow down.</li>
<li>What each baseline keeps of its original is told in
<code>ellm_sgl/eval/simulator/modes.py</code>.</li>
<li>Up to 8 decode steps (4 on llama3-8b, 64 and 32 on L-Eval) follow one decision where no request
ends, arrives or pauses: on llama3-8b, where it matters most, up to 1 % of the tokens per second and
7 % of the TTFT against one step per decision.</li>
<li>Elastic memory: Poisson arrivals, at most 256 requests at once (vLLM's default), ShareGPT's
lengths as above; SLOs are 25 times the latency model's TTFT and TPOT of a request alone. vLLM and
eLLM compute prompts whole, and decoding waits; with chunked prefill a chunk shares its step with
those that decode. Activations are those of the MLP's widest point, 102 kB a row of Llama3-8B.
Mapping memory costs no time (the paper: 1 to 5 %). What is kept of its algorithms is told in
<code>ellm_sgl/eval/simulator/balloon.py</code>. Up to 64 decode steps follow one decision, and one
look of Alg. 2.</li></ul>"""
