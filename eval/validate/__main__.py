"""`python -m ellm_sgl.eval.validate [--model-path DIR ...] [--only N] [--rounds N] [--json]`.

Serves each model (the demo model unless told otherwise; `python -m ellm_sgl.eval.tiny_models`
writes random ones) in every mode. Loads of their own teach the simulator the machine: the hardware
profile is fitted to the steps that the server reports, and what TTFT has beyond the simulated one
is what HTTP takes. Then each configuration of load, memory, policy and mode is replayed, and
simulated twice: knowing no more than that and the machine's mean speed, and knowing how long each
step took.
About 8 minutes for the demo model, 14 for larger ones; nothing else should run.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from ellm_sgl.client.process import DEMO_MODEL, ServerError
from ellm_sgl.config import ConfigError
from ellm_sgl.config.click_types import ROUNDS
from ellm_sgl.config.commands import json_flag, json_text, progress_lines, told_in_a_line
from ellm_sgl.eval.validate.configurations import CONFIGURATIONS
from ellm_sgl.eval.validate.measure import validate
from ellm_sgl.eval.validate.results import overall, table


@click.command()
@click.option(
    "--model-path",
    "model_paths",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    default=(DEMO_MODEL,),
    help="May be given several times.",
)
@click.option(
    "--only",
    type=click.IntRange(1, len(CONFIGURATIONS)),
    help="The first so many configurations of each.",
)
@click.option(
    "--rounds",
    type=ROUNDS,
    default=1,
    show_default=True,
    help="Replays of each; from two on, how far one is from another is told.",
)
@json_flag
def main(model_paths: tuple[Path, ...], only: int | None, rounds: int, as_json: bool) -> None:
    """Hold the simulator's predictions against real servers."""
    err = Console(stderr=True)
    found = []
    with told_in_a_line(ServerError, ConfigError):
        for path in model_paths:
            err.print(str(path))
            found.append(validate(path, CONFIGURATIONS[:only], rounds, progress_lines))
            err.print(table(found[-1]))
    summed = overall(found)
    if as_json:
        click.echo(json_text(summed))
        return
    mape = summed["mape"]
    click.echo(
        f"{summed['configurations']} configurations: MAPE of tokens/s {mape['tokens_per_s']:.1%}, "
        f"mean TTFT {mape['ttft']:.1%}, mean TPOT {mape['tpot']:.1%}; modes ranked as measured in "
        f"{summed['rankings_correct']} of {summed['rankings']} cells ({summed['pairs_right']} of "
        f"{summed['pairs']} pairs, {summed['pairs_apart']} of them apart)"
    )


if __name__ == "__main__":
    main()
