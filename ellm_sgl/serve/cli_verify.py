"""`ellm-sgl verify`: the proof that eLLM changes no output, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ellm_sgl.config import ELLM, MODES
from ellm_sgl.config.click_types import LAYERS, TOKENS
from ellm_sgl.config.commands import json_flag, model_path_option, show, told_in_a_line
from ellm_sgl.serve.verify.figures import Comparison, VerifyReport
from ellm_sgl.serve.verify.rounding import EXACT, UNIT_ROUNDOFF, Spread

DTYPES = (EXACT, *UNIT_ROUNDOFF)
FIGURES = {
    "recomputed_tokens": "recom-\nputed",
    "evicted_units": "evic-\nted",
    "fetched_units": "fetched",
    "pauses": "pauses",
    "retractions": "retr.",
}
"""Counts of a comparison, with their headings."""
BATCH_SIZES = "stock, two batch sizes"


@click.command()
@model_path_option
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="May be given several times.  [default: float32 and bfloat16; on CUDA bfloat16]",
)
@click.option("--ellm-layer-group", "layer_group", type=LAYERS, default=4)
@click.option("--ellm-block-tokens", "block_tokens", type=TOKENS, default=16)
@click.option(
    "--max-prompt-tokens", type=TOKENS, default=1500, help="Leave out prompts longer than this."
)
@click.option("--output-tokens", type=TOKENS, default=16, help="Tokens per prompt.")
@click.option(
    "--ellm-mode",
    "mode",
    type=click.Choice(MODES),
    default=ELLM,
    help="A baseline instead: under pressure, with at least 160 tokens per prompt.",
)
@click.option(
    "--resizes",
    type=click.IntRange(0, 10_000),
    default=0,
    help="Resize the pool so often, at random, while the load of each setting runs.",
)
@click.option("--quick", is_flag=True, help="Three splits, and chats in fp32, instead of all.")
@json_flag
def verify(
    model_path: str | None,
    dtypes: tuple[str, ...],
    layer_group: int,
    block_tokens: int,
    max_prompt_tokens: int,
    output_tokens: int,
    mode: str,
    resizes: int,
    quick: bool,
    as_json: bool,
) -> None:
    """Prove that eLLM changes no output: compare it with stock SGLang on one model.

    Exit status 0 only if every setting did what it is for, and its outputs are stock's: in fp32
    every greedy token, with log-probabilities within 1e-4; in 16 bits log-probabilities that
    differ by no more than rounding, which is measured on stock SGLang.
    """
    from ellm_sgl.client.process import ServerError, stop_on_signals
    from ellm_sgl.serve.verify import runner  # imports PyTorch, which takes seconds
    from ellm_sgl.sglang.versions import check_known

    with told_in_a_line(ServerError, OSError, ValueError), stop_on_signals():
        check_known()
        report = runner.verify(
            model_path,
            dtypes=tuple(dict.fromkeys(dtypes)) or runner.default_dtypes(),
            lengths=[n for n in runner.LENGTHS if n <= max_prompt_tokens],
            output_tokens=output_tokens,
            layer_group=layer_group,
            block_tokens=block_tokens,
            quick=quick,
            mode=mode,
            resizes=resizes,
        )
    if as_json:
        click.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        _show(report, Console())
    if not report.passed:
        raise click.ClickException(_what_failed(report))


def _what_failed(report: VerifyReport) -> str:
    """One line."""
    first, *others = report.failures
    more = f" (and {len(others)} more)" if others else ""
    return f"verify failed: {first}{more}"


def _show(report: VerifyReport, console: Console) -> None:
    for dtype in dict.fromkeys(c.dtype for c in report.comparisons):
        show(_table(report, dtype), console)
        if resized := _resized([c for c in report.comparisons if c.dtype == dtype]):
            console.print(resized, highlight=False)
    for reason in report.left_out:
        console.print(f"left out: {escape(reason)}")
    for failure in report.failures:
        console.print(f"[red]failed:[/red] {escape(failure)}")
    verdict = "[green]passed[/green]" if report.passed else "[red]failed[/red]"
    console.print(f"{escape(report.model_path)}: {verdict}")


def _table(report: VerifyReport, dtype: str) -> Table:
    """A row for each setting, in 16 bits below one of what is measured on stock SGLang; of the
    figures those that one of them has."""
    rows = [c for c in report.comparisons if c.dtype == dtype]
    scored = any(c.forced is not None for c in rows)
    title = f"{dtype}: eLLM against stock SGLang, {report.prompts} prompts, "
    title += f"{report.output_tokens} tokens each"
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, title=title)
    shown = {name: h for name, h in FIGURES.items() if any(getattr(c, name) for c in rows)}
    difference = "|Δlogp|\nmean, max" if scored else "|Δlogp|"
    for heading in ("setting", "agree", difference, *shown.values(), ""):
        table.add_column(heading, justify="left" if heading == "setting" else "right", no_wrap=True)
    noise: Spread | None = None
    for c in rows:
        if c.noise not in (None, noise):
            noise = c.noise
            table.add_row(BATCH_SIZES, "", _spread(noise))
        agree = f"{c.agreement:.1%}" if scored else f"{c.agreeing}/{c.tokens}"
        difference = _spread(c.forced) if scored else f"{c.max_logprob_difference:.1e}"
        figures = (_short(getattr(c, name)) for name in shown)
        mark = "ok" if c.failure is None else "[red]FAIL[/red]"
        table.add_row(c.setting, agree, difference, *figures, mark)
    return table


def _resized(rows: Sequence[Comparison]) -> str:
    """What became of all resizes at random sizes; empty where there were none."""
    applied, floor, overtaken = (
        sum(getattr(c, name) for c in rows) for name in ("resized", "at_floor", "overtaken")
    )
    if not (applied or floor or overtaken):
        return ""
    return f"resizes: {applied:,} applied, {floor:,} at the floor, {overtaken:,} overtaken"


def _spread(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.mean:.1e} {spread.largest:.1e}"


def _short(count: int) -> str:
    """At most six characters."""
    if count < 100_000:
        return f"{count:,}"
    return f"{count // 1000:,}k" if count < 10_000_000 else f"{count // 1_000_000}M"
