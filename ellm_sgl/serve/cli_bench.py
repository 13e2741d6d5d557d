"""`ellm-sgl bench`: measure on real servers on this machine; and commands imported when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ellm_sgl.config import ConfigError

SCENARIOS = ("ablation", "busy-core", "compare", "fusion", "layer-groups", "load-sweep", "overhead",
             "pressure", "priorities", "rotation")  # fmt: skip
"""Modules of `ellm_sgl.eval.bench.scenarios`."""


class BenchGroup(click.Group):
    """A group with scenarios among its commands, which are imported when they are asked for: other
    commands need not wait for that.

    Args:
        scenarios: their names.
    """

    def __init__(self, *args: Any, scenarios: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._scenarios = scenarios

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._scenarios})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Names of modules are understood as well: busy_core is busy-core."""
        name = cmd_name.replace("_", "-")
        if name not in self._scenarios:
            return super().get_command(ctx, cmd_name)
        from ellm_sgl.eval.bench.command import command
        from ellm_sgl.eval.bench.scenarios import scenario

        return command(name, scenario(name))


def _show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        for name in SCENARIOS:
            found = bench.get_command(ctx, name)
            click.echo(f"{name:13} {found.get_short_help_str(100) if found else ''}")
        ctx.exit()


@click.group(cls=BenchGroup, scenarios=SCENARIOS)
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_show,
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
    from ellm_sgl.eval.bench.tables import rewrite

    try:
        changed = rewrite(docs, write=not check)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    for file in changed:
        click.echo(f"{'differs' if check else 'rewritten'}: {file}")
    if check and changed:
        raise click.ClickException("run `ellm-sgl bench tables`")
