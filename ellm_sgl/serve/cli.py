"""The command `ellm-sgl`."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import click
from rich.console import Console

from ellm_sgl import __version__
from ellm_sgl.client.process import DEMO_ARGUMENTS, SERVER_ENVIRONMENT, ServerError
from ellm_sgl.config import ELLM, ConfigError
from ellm_sgl.config.commands import answer, json_flag, told_in_a_line
from ellm_sgl.config.flags import FLAGS
from ellm_sgl.config.ranges import MOST_TOKENS, shown
from ellm_sgl.config.resolve import resolve
from ellm_sgl.serve.calibrate import calibrate
from ellm_sgl.serve.cli_bench import bench, compare
from ellm_sgl.serve.cli_kernels import kernels
from ellm_sgl.serve.cli_memory import memory
from ellm_sgl.serve.cli_paper import paper
from ellm_sgl.serve.cli_policies import policies
from ellm_sgl.serve.cli_simulate import simulate
from ellm_sgl.serve.cli_verify import verify

DEFAULT_POLICY = "fcfs"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
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
        resolve(values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


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

    live = sys.stdout.isatty() and not as_json
    progress = Console() if live else Console(stderr=True, force_terminal=False)
    load = ChatLoad(streams, output_tokens)
    with told_in_a_line(ServerError, ValueError):
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


for command in (verify, policies, calibrate, compare, bench, simulate, paper, kernels, memory):
    main.add_command(command)

if __name__ == "__main__":
    main()
