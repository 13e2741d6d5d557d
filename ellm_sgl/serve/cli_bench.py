"""`ellm-sgl bench`: measure on real servers on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench.command import command
from ellm_sgl.eval.bench.scenarios import SCENARIOS
from ellm_sgl.eval.bench.tables import rewrite


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
    try:
        changed = rewrite(docs, write=not check)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for file in changed:
        click.echo(f"{'differs' if check else 'rewritten'}: {file}")
    if check and changed:
        raise click.ClickException("run `ellm-sgl bench tables`")


for _name, _scenario in SCENARIOS.items():
    bench.add_command(command(_name, _scenario))
compare = bench.commands["compare"]
"""For users a command of its own, too."""
