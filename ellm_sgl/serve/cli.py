"""The command `ellm-sgl`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console

from ellm_sgl import __version__
from ellm_sgl.client.process import DEMO_ARGUMENTS, SERVER_ENVIRONMENT, ServerError
from ellm_sgl.config import ELLM, ConfigError
from ellm_sgl.config.commands import FILE, answer, json_flag, told_in_a_line
from ellm_sgl.config.flags import FLAGS
from ellm_sgl.config.ranges import MOST_TOKENS
from ellm_sgl.config.resolve import DEFAULT_POLICY, settings_of
from ellm_sgl.serve import config_file
from ellm_sgl.serve.calibrate import calibrate
from ellm_sgl.serve.cli_advise import advise
from ellm_sgl.serve.cli_bench import bench, compare
from ellm_sgl.serve.cli_kernels import kernels
from ellm_sgl.serve.cli_memory import memory
from ellm_sgl.serve.cli_paper import paper
from ellm_sgl.serve.cli_policies import policies
from ellm_sgl.serve.cli_simulate import simulate
from ellm_sgl.serve.cli_top import top
from ellm_sgl.serve.cli_verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="ellm-sgl")
@click.option(
    "--config",
    type=FILE,
    envvar="ELLM_SGL_CONFIG_FILE",
    help="A TOML file with a table of options for each command, and [sglang] for serve.",
)
@click.pass_context
def main(ctx: click.Context, config: Path | None) -> None:
    """Keep SGLang serving when KV-cache memory runs out.

    Every option can also be given as ELLM_SGL_COMMAND_OPTION in the environment, or in --config
    FILE. The command line counts first, then the environment, then the file.
    """
    if config is not None:
        with told_in_a_line(ConfigError):
            ctx.default_map, ctx.obj = config_file.read(config, main)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes commands and options in a shell, for its start-up file:

    eval "$(ellm-sgl completion bash)"
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "ellm-sgl", "_ELLM_SGL_COMPLETE").source())


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
@click.pass_context
def serve(ctx: click.Context, /, sglang_arguments: tuple[str, ...], **ellm: Any) -> None:
    """Start SGLang's server with eLLM.

    Takes every argument of `python -m sglang.launch_server` beside those below. Without
    --model-path it serves the demo model that comes with this package.
    """
    given = {name: text for name, text in ellm.items() if text is not None}
    mode = given.get("ellm_mode", ELLM)
    given.setdefault("ellm_policy", DEFAULT_POLICY if mode == ELLM else mode)
    try:  # before SGLang is imported, which takes seconds
        settings_of({name.removeprefix("ellm_"): text for name, text in given.items()})
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    # Of an argument that is there twice SGLang takes the last.
    arguments = [*(ctx.obj or ()), *sglang_arguments]
    if not any(a.split("=")[0] in ("--model-path", "--model", "--config") for a in arguments):
        arguments += DEMO_ARGUMENTS
    for name, value in given.items():
        arguments += ["--" + name.replace("_", "-"), str(value)]
    command = [sys.executable, "-m", "ellm_sgl.serve.launch", *arguments]
    sys.stdout.flush()
    os.execve(sys.executable, command, {**SERVER_ENVIRONMENT, **os.environ})


@main.command()
@click.option("--streams", type=click.IntRange(1, 24), default=24, help="Chats at once.")
@click.option(
    "--output-tokens", type=click.IntRange(1, 4096), default=256, help="At most, per chat."
)
@click.option(
    "--pool-tokens",
    type=click.IntRange(16, MOST_TOKENS),
    help="Small pool; with --colocated, what both servers have together.  [default: a third of "
    "what is needed; what one burst needs]",
)
@click.option("--colocated", is_flag=True, help="Two servers that share memory, by turns busy.")
@json_flag
def demo(
    streams: int, output_tokens: int, pool_tokens: int | None, colocated: bool, as_json: bool
) -> None:
    """Chats on a server whose memory is far too small, beside stock SGLang. About 3 minutes.

    With --colocated: two servers on one machine that have bursts of chats by turns, with a shared
    budget of memory, with a static half each, and with all of it for each alone.

    Exit status 0 only if eLLM completed every chat, with the text that ample memory gives.
    """
    from ellm_sgl.serve.chat_load import ChatLoad
    from ellm_sgl.serve.colocated import run_colocated
    from ellm_sgl.serve.colocated_report import render as render_colocated
    from ellm_sgl.serve.demo import run_demo
    from ellm_sgl.serve.demo_report import render
    from ellm_sgl.sglang.versions import check_known

    live = sys.stdout.isatty() and not as_json
    progress = Console() if live else Console(stderr=True, force_terminal=False)
    load = ChatLoad(streams, output_tokens)
    with told_in_a_line(ServerError, ValueError):
        check_known()
        if colocated:
            shared = run_colocated(load, pool_tokens, progress)
            answer(as_json, shared.to_json(), render_colocated(shared))
            sys.exit(0 if shared.ok else 1)
        report = run_demo(load, pool_tokens, progress)
    answer(as_json, report.to_json(), render(report))
    sys.exit(0 if report.ok else 1)


@main.command()
@json_flag
def doctor(as_json: bool) -> None:
    """Tell what this machine and this install can run, each problem with its remedy."""
    from ellm_sgl.serve.doctor import examine

    findings = examine()
    healthy = all(f.ok for f in findings)
    lines = []
    for finding in findings:
        mark = click.style("ok ", fg="green") if finding.ok else click.style("BAD", fg="red")
        lines.append(f"{mark} {finding.name}: {finding.found}")
        if finding.remedy:
            lines.append(f"    -> {finding.remedy}")
    found = [dataclasses.asdict(f) for f in findings]
    answer(as_json, {"ok": healthy, "findings": found}, *lines)
    sys.exit(0 if healthy else 1)


for command in (
    advise,
    verify,
    policies,
    calibrate,
    compare,
    bench,
    simulate,
    paper,
    kernels,
    memory,
    top,
):
    main.add_command(command)
config_file.take_from_environment(main, "ELLM_SGL")

if __name__ == "__main__":
    main()
