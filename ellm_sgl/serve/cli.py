"""The command `ellm-sgl`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from ellm_sgl import __version__
from ellm_sgl.click_types import LAYERS, TOKENS
from ellm_sgl.config import ELLM, MODES, ConfigError
from ellm_sgl.flags import FLAGS
from ellm_sgl.ranges import MOST_TOKENS, shown
from ellm_sgl.serve.cli_calibrate import calibrate
from ellm_sgl.serve.cli_compare import compare
from ellm_sgl.serve.cli_kernels import kernels
from ellm_sgl.serve.cli_paper import paper
from ellm_sgl.serve.cli_policies import policies
from ellm_sgl.serve.cli_simulate import simulate
from ellm_sgl.settings import settle

DEFAULT_POLICY = "fcfs"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ellm-sgl")
def main() -> None:
    """Keep SGLang serving when KV-cache memory runs out."""


def ellm_options(command: Any) -> Any:
    """The --ellm-* options beside --ellm-policy; their values stay text, for SGLang to parse."""
    for flag in reversed(FLAGS):
        command = click.option(flag.option, metavar=flag.metavar, help=flag.help)(command)
    return command


@main.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--ellm-policy",
    metavar="NAME",
    help="Policy that decides who runs and what stays cached; 'off' is stock SGLang.  [default: "
    f"{DEFAULT_POLICY}]",
)
@ellm_options
@click.argument("sglang_arguments", nargs=-1, type=click.UNPROCESSED)
def serve(sglang_arguments: tuple[str, ...], **ellm: Any) -> None:
    """Start SGLang's server with eLLM.

    Takes every argument of `python -m sglang.launch_server` beside those below. Without
    --model-path it serves the demo model that comes with this package.
    """
    from ellm_sgl.serve.process import DEMO_ARGUMENTS, SERVER_ENVIRONMENT

    given = {name: text for name, text in ellm.items() if text is not None}
    mode = given.get("ellm_mode", ELLM)
    given.setdefault("ellm_policy", DEFAULT_POLICY if mode == ELLM else mode)
    if given["ellm_policy"] != "off":
        _check(given)
    arguments = list(sglang_arguments)
    if not any(a.split("=")[0] in ("--model-path", "--model", "--config") for a in arguments):
        arguments += DEMO_ARGUMENTS
    for name, value in given.items():
        arguments += ["--" + name.replace("_", "-"), str(value)]
    command = [sys.executable, "-m", "ellm_sgl.serve.launch", *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**SERVER_ENVIRONMENT, **os.environ})


def _check(given: dict[str, str]) -> None:
    """Refuse settings that make no sense before SGLang is imported, which takes seconds."""
    values: dict[str, Any] = {"policy": given["ellm_policy"]}
    try:
        for flag in FLAGS:
            if (text := given.get("ellm_" + flag.field)) is not None:
                try:
                    values[flag.field] = flag.parse(text)
                except ValueError:
                    raise ConfigError(f"{flag.option} {shown(text)}: give {flag.kind}") from None
        settle(values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.option("--model-path", metavar="DIR", help="A local model.  [default: the demo model]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    help="May be given twice.  [default: both]",
)
@click.option("--ellm-layer-group", "layer_group", type=LAYERS, default=4, show_default=True)
@click.option("--ellm-block-tokens", "block_tokens", type=TOKENS, default=16, show_default=True)
@click.option(
    "--max-prompt-tokens",
    type=TOKENS,
    default=1500,
    show_default=True,
    help="Leave out prompts longer than this.",
)
@click.option(
    "--output-tokens", type=TOKENS, default=16, show_default=True, help="Tokens per prompt."
)
@click.option(
    "--ellm-mode",
    "mode",
    type=click.Choice(MODES),
    default=ELLM,
    show_default=True,
    help="A baseline instead: under pressure, with at least 160 tokens per prompt.",
)
@click.option("--quick", is_flag=True, help="One ratio and two splits instead of all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def verify(
    model_path: str | None,
    dtype: tuple[str, ...],
    layer_group: int,
    block_tokens: int,
    max_prompt_tokens: int,
    output_tokens: int,
    mode: str,
    quick: bool,
    as_json: bool,
) -> None:
    """Prove that eLLM changes no output: compare it with stock SGLang on one model.

    Exit status 0 only if, in fp32, every greedy token agrees and no log-probability differs by
    more than 1e-4. bf16 is reported: there a different order of additions may tip a near tie.
    """
    from ellm_sgl.serve import verify as verification
    from ellm_sgl.serve.process import ServerError

    err = Console(stderr=True)
    try:
        report = verification.verify(
            model_path,
            say=lambda line: err.print(f"[dim]{line}[/dim]"),
            dtypes=dtype or verification.DTYPES,
            lengths=[n for n in verification.LENGTHS if n <= max_prompt_tokens] or [1],
            output_tokens=output_tokens,
            layer_group=layer_group,
            block_tokens=block_tokens,
            quick=quick,
            mode=mode,
        )
    except (ServerError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        for name in dict.fromkeys(c.dtype for c in report.comparisons):
            Console().print(_verify_table(report, name))
        verdict = "[green]passed[/green]" if report.passed else "[red]failed[/red]"
        Console().print(f"{report.model_path}: {verdict}")
    sys.exit(0 if report.passed else 1)


def _verify_table(report: Any, dtype: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title=f"{dtype}: eLLM against stock SGLang, {report.prompts} prompts, "
        f"{report.output_tokens} tokens each",
    )
    headings = (
        "setting",
        "agree",
        "|Δlogp|",
        "recom-\nputed",
        "evic-\nted",
        "fetched",
        "retr.",
        "out",
        "table",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "setting" else "right", no_wrap=True)
    for c in report.comparisons:
        if c.dtype == dtype:
            table.add_row(
                c.setting, f"{c.agreeing}/{c.tokens}", f"{c.max_logprob_difference:.1e}",
                f"{c.recomputed_tokens:,}", f"{c.evicted_units:,}", f"{c.fetched_units:,}",
                str(c.retractions), str(c.sat_out), c.integrity,
            )  # fmt: skip
    return table


@main.command()
@click.option(
    "--streams", type=click.IntRange(1, 24), default=24, show_default=True, help="Chats at once."
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1, 4096),
    default=256,
    show_default=True,
    help="At most, per chat.",
)
@click.option(
    "--pool-tokens",
    type=click.IntRange(16, MOST_TOKENS),
    help="Small pool.  [default: a third of what is needed]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def demo(streams: int, output_tokens: int, pool_tokens: int | None, as_json: bool) -> None:
    """Chats on a server whose memory is far too small, beside stock SGLang. About 3 minutes.

    Exit status 0 only if eLLM completed every chat, with the text that ample memory gives.
    """
    from ellm_sgl.serve.demo import DemoOptions, run_demo
    from ellm_sgl.serve.demo_table import render
    from ellm_sgl.serve.process import ServerError

    live = sys.stdout.isatty() and not as_json
    progress = Console() if live else Console(stderr=True, force_terminal=False)
    try:
        report = run_demo(DemoOptions(streams, output_tokens, pool_tokens), progress)
    except (ServerError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        Console().print(render(report))
    sys.exit(0 if report.ok else 1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def doctor(as_json: bool) -> None:
    """Tell what this machine and this install can run, each problem with its remedy."""
    from ellm_sgl.serve.doctor import examine

    findings = examine()
    healthy = all(f.ok for f in findings)
    if as_json:
        click.echo(json.dumps({
            "ok": healthy, "findings": [dataclasses.asdict(f) for f in findings],
        }))  # fmt: skip
    else:
        for finding in findings:
            mark = click.style("ok ", fg="green") if finding.ok else click.style("BAD", fg="red")
            click.echo(f"{mark} {finding.name}: {finding.found}")
            if finding.remedy:
                click.echo(f"    -> {finding.remedy}")
    sys.exit(0 if healthy else 1)


main.add_command(policies)
main.add_command(calibrate)
main.add_command(compare)
main.add_command(simulate)
main.add_command(paper)
main.add_command(kernels)

if __name__ == "__main__":
    main()
