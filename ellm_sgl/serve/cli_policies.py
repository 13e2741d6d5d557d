"""`ellm-sgl policies`: which policies there are, whether one keeps the rules, how fast it is."""

from __future__ import annotations

import inspect
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from ellm_sgl.config import ConfigError
from ellm_sgl.config.click_types import MILLISECONDS
from ellm_sgl.config.commands import (
    answer,
    json_flag,
    plain_table,
    policy_options,
    told_in_a_line,
)
from ellm_sgl.eval.paper import claims
from ellm_sgl.policies.checks import InvalidAnswer
from ellm_sgl.policies.registry import create, installed, load, provider

if TYPE_CHECKING:
    from ellm_sgl.policies.testing import ConformanceReport
    from ellm_sgl.policies.testing.bench import PolicyBench, Timing

_MARKS = {"passed": "[green]passed[/green]", "failed": "[red]FAILED[/red]", "skipped": "skipped"}

_options_option = policy_options("Passed to the policy's constructor, as --ellm-policy-options.")


@click.group()
def policies() -> None:
    """List, check and time the installed policies."""


@policies.command("list")
@json_flag
def list_(as_json: bool) -> None:
    """Every policy that an installed package registers, and the options it takes.

    Exit status 1 if one of them cannot be used.
    """
    found = [_described(name) for name in installed()]
    lines = (
        f"{click.style(policy['name'], bold=True)}{policy['options'] or ''}\n"
        f"    {policy['error'] or policy['summary']}\n"
        f"    from {policy['package']}, {policy['class']}"
        for policy in found
    )
    answer(as_json, {"policies": found}, *lines)
    sys.exit(1 if any(policy["error"] for policy in found) else 0)


def _described(name: str) -> dict[str, str | None]:
    entry = installed()[name]
    described = {"name": name, "package": provider(entry), "class": entry.value}
    try:
        cls = load(name)
    except ConfigError as error:
        return described | {"summary": None, "options": None, "error": str(error)}
    summary = (inspect.getdoc(cls) or "(no docstring)").split("\n\n")[0].replace("\n", " ")
    options = str(inspect.signature(cls).replace(return_annotation=inspect.Signature.empty))
    return described | {"summary": summary, "options": options, "error": None}


@policies.command()
@click.argument("name")
@_options_option
@click.option(
    "--states", type=click.IntRange(1, 10**6), default=60, help="Generated states per check."
)
@click.option(
    "--budget-ms", type=MILLISECONDS, default=5.0, help="As the server's --ellm-policy-budget-ms."
)
@json_flag
def check(name: str, options: dict[str, Any], states: int, budget_ms: float, as_json: bool) -> None:
    """Run the conformance kit on a policy. Exit status 0 only if no check failed."""
    from ellm_sgl.policies.testing import examine

    with told_in_a_line(ConfigError):
        create(name, options)
        report = examine(lambda: create(name, options), states=states, budget_ms=budget_ms)
    verdict = _MARKS["passed"] if report.ok else "[red]failed[/red]"
    shown = _check_table(name, report), Text.from_markup(f"{name}: {verdict}")
    answer(as_json, report.to_json() | {"policy": name, "options": options}, *shown)
    sys.exit(0 if report.ok else 1)


def _check_table(name: str, report: ConformanceReport) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title=f"Policy {name}")
    table.add_column("check", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("detail", overflow="fold")
    for result in report.results:
        table.add_row(result.name, _MARKS[result.outcome], f"{result.seconds:.1f}", result.detail)
    return table


@policies.command()
@click.argument("name", required=False)
@_options_option
@json_flag
def bench(name: str | None, options: dict[str, Any], as_json: bool) -> None:
    """Time decisions with 256 running and 1,024 waiting requests; of all policies without NAME."""
    from ellm_sgl.policies.testing import bench as benchmark

    if options and not name:
        raise click.UsageError("--options needs NAME: policies take different ones")
    with told_in_a_line(ConfigError, InvalidAnswer):
        results = [benchmark.bench(each, options) for each in ([name] if name else installed())]
    document = {
        "running": benchmark.RUNNING,
        "waiting": benchmark.WAITING,
        "paper": {
            "decision_mean_us": [ms * 1e3 for ms in _said_ms()],
            "split_us": claims.SPLIT_MS * 1e3,
        },
        "policies": [asdict(result) for result in results],
    }
    answer(as_json, document, _bench_table(results))


def _said_ms() -> tuple[float, float]:
    """The paper's least and largest mean time of a decision."""
    said = claims.DECISION_MS.values()
    return min(said), max(said)


def _bench_table(results: list[PolicyBench]) -> Table:
    from ellm_sgl.policies.testing.bench import RUNNING, WAITING

    def ms(timing: Timing) -> list[str]:
        return [f"{us / 1e3:.3f}" for us in (timing.mean_us, timing.p50_us, timing.p99_us)]

    title = f"Milliseconds to decide, {RUNNING} running and {WAITING:,} waiting requests"
    figures = ("mean", "p50", "p99", "steady", "l1, l2, δ", "first")
    table = plain_table("policy", figures, title=title)
    for r in results:
        table.add_row(
            r.policy, *ms(r.decision), ms(r.steady)[1], ms(r.split)[0], f"{r.first_us / 1e3:.1f}"
        )
    low, high = _said_ms()
    paper = ("the paper", f"{low}-{high}", "", "", "", f"{claims.SPLIT_MS}", "")
    table.add_row(*paper, style="dim")
    return table
