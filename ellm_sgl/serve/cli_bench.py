"""`ellm-sgl bench`: measure on real servers on this machine."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from ellm_sgl.client.process import ServerError
from ellm_sgl.config import ConfigError
from ellm_sgl.config.commands import FILE, json_flag, json_text, show, told_in_a_line
from ellm_sgl.eval.bench import report
from ellm_sgl.eval.bench.result import MeasurementError
from ellm_sgl.eval.bench.runner import run
from ellm_sgl.eval.bench.scenario import OPTION, Scenario
from ellm_sgl.eval.bench.scenarios import SCENARIOS
from ellm_sgl.eval.bench.tables import rewrite
from ellm_sgl.eval.plotting import check_plot_file


class _Scenarios(click.Group):
    """Names of modules are understood as well: busy_core is busy-core."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name.replace("_", "-"))


def _list(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        for name in SCENARIOS:
            click.echo(f"{name:13} {bench.commands[name].get_short_help_str(100)}")
        ctx.exit()


@click.group(cls=_Scenarios)
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
              help="Name the scenarios, a line each.")  # fmt: skip
def bench() -> None:
    """Measure on real servers: a scenario's servers stand side by side, one under load at a time,
    in an order that alternates; ratios are those within a round."""


@bench.command()
@click.option("--docs", type=click.Path(path_type=Path, exists=True, file_okay=False),
              default="docs", show_default=True)  # fmt: skip
@click.option("--check", is_flag=True, help="Change nothing; fail if something would change.")
def tables(docs: Path, check: bool) -> None:
    """Write the tables of docs/*.md anew from the documents in docs/results/.

    A table stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME.json is what `--json`
    printed.
    """
    with told_in_a_line(ConfigError):
        changed = rewrite(docs, write=not check)
    for file in changed:
        click.echo(f"{'differs' if check else 'rewritten'}: {file}")
    if check and changed:
        raise click.ClickException("run `ellm-sgl bench tables`")


def _command(name: str, kind: type[Scenario]) -> click.Command:
    """The docstring of its module as help, its fields as options, and --plot and --json."""
    about = sys.modules[kind.__module__].__doc__
    made = click.Command(name, callback=partial(_run, name, kind), help=about)
    for field in dataclasses.fields(kind):
        flag, given = field.metadata[OPTION]
        declared = [flag or "--" + field.name.replace("_", "-"), field.name]
        made.params.append(click.Option(declared, **given))
    plot = click.option("--plot", "file", type=FILE, help="Write a plot to this PNG, SVG or PDF.")
    return json_flag(plot(made))


def _run(name: str, kind: type[Scenario], file: Path | None, as_json: bool, **options: Any) -> None:
    with told_in_a_line(ServerError, MeasurementError, ValueError):
        if file is not None:
            check_plot_file(file)
        scenario = kind(**options)
        scenario.check()
        _measure(name, scenario, file, as_json)


def _measure(name: str, scenario: Scenario, file: Path | None, as_json: bool) -> None:
    begun = report.provenance()
    with Progress(console=Console(stderr=True)) as bar:
        total = scenario.rounds * len(scenario.cells()) * len(scenario.settings())
        task = bar.add_task(name, total=total)
        result = run(
            scenario,
            lambda line: bar.console.print(line, style="dim", highlight=False, markup=False),
            lambda: bar.advance(task),
        )
    if file is not None:
        report.plot(scenario, result, file)
    if as_json:
        click.echo(json_text(begun | report.document(name, scenario, result)))
        return
    console = Console()
    for part in report.render(scenario, result):
        show(part, console)


for _name, _scenario in SCENARIOS.items():
    bench.add_command(_command(_name, _scenario))
compare = _command("compare", SCENARIOS["compare"])
"""For users a command of its own, too."""
