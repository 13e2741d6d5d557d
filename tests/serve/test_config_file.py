"""`--config FILE`, the environment, and which of them counts; shell completion."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ellm_sgl.serve import config_file
from ellm_sgl.serve.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
ADVISE = ("advise", "--device", "l4", "--json")


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, list(arguments))


def kv_tokens(*arguments: str, **environment: str) -> int:
    done = run(*arguments, **environment)
    assert done.exit_code == 0, done.output
    return int(json.loads(done.stdout)["kv_tokens"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ellm.toml"
    path.write_text("[advise]\nkv-tokens = 3000\nprompt_tokens = 100\n")
    return path


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    file: Path,
) -> None:
    of_file = ("--config", str(file))
    said = {"ELLM_SGL_ADVISE_KV_TOKENS": "4000"}
    assert kv_tokens(*of_file, *ADVISE) == 3000
    assert kv_tokens(*ADVISE, ELLM_SGL_CONFIG_FILE=str(file)) == 3000
    assert kv_tokens(*of_file, *ADVISE, **said) == 4000
    assert kv_tokens(*of_file, *ADVISE, "--kv-tokens", "5000", **said) == 5000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[advice]\n", "'advice' is not known here; did you mean advise?"),
        ("[advise]\nkv_token = 1\n", "[advise]: 'kv_token' is not known here; did you mean kv_t"),
        ("[serve]\nellm_ratios = 0.5\n", "did you mean ellm_ratio?"),
        ("[sglang]\nmodel_pth = 'a'\n", "'model_pth' is no argument of SGLang's; did you mean mod"),
        ("[advise]\nkv_tokens = true\n", "'on' is not a valid integer"),
        ("[advise]\nkv_tokens = 0\n", "0 is not in the range"),
        ("[advise]\njson = 1\n", "json 1: give true or false"),
        ("[advise]\nkv_tokens = [1]\n", "kv_tokens [1]: give a text"),
        ("advise = 1\n", "advise is a command; write a table, [advise]"),
        ("[bench.overheads]\n", "'overheads' is not known here; did you mean overhead?"),
        ("[advise\n", "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "ellm.toml"
    path.write_text(text)
    done = run("--config", str(path), *ADVISE)
    assert done.exit_code in (1, 2)
    assert named in done.stderr and "Traceback" not in done.stderr


def options(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Option]]:
    """Each option of the commands below a command, with its command's path."""
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from options(each, *path, name)
        return
    yield from ((path, option) for option in command.params if isinstance(option, click.Option))


def test_every_option_goes_by_its_flag(tmp_path: Path) -> None:
    file, seen = tmp_path / "ellm.toml", 0
    for path, option in options(main):
        written = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        name = "_".join(["ELLM_SGL", *path, written]).upper().replace("-", "_")
        assert isinstance(option.envvar, list)
        assert set(option.envvar) - {"ELLM_SGL_API_KEY", "ELLM_SGL_ADMIN_API_KEY"} == {name}
        value = "true" if option.is_flag else "1"
        file.write_text(f"[{'.'.join(path)}]\n{written} = {value}\n")
        found, _ = config_file.read(file, main)
        for part in path:
            found = found[part]
        assert list(found) == [option.name]
        seen += 1
    assert seen > 200


def test_the_environment_is_read_by_flags() -> None:
    done = run("simulate", ELLM_SGL_SIMULATE_PRESET="nosuch")
    assert done.exit_code == 1 and "no preset 'nosuch'" in done.stderr


def test_what_ends_the_command_is_no_setting() -> None:
    """Images say which version they are of."""
    for version in ("0.1.0", "1"):
        done = run("policies", "list", "--json", ELLM_SGL_VERSION=version)
        assert done.exit_code == 0 and done.stdout.startswith("{"), done.output


def test_the_guides_file_is_read(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(\[serve\].*?)```", GUIDE.read_text(), re.DOTALL)
    file = tmp_path / "ellm.toml"
    file.write_text(text)
    found, sglang = config_file.read(file, main)
    assert found["simulate"] == {"preset_name": "llama3-8b"} and "--model-path" in sglang


def test_a_file_that_is_not_there() -> None:
    assert "cannot be read" in run("--config", "/no/such.toml", "doctor").stderr


def test_serve_takes_both_projects_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given on the command line comes last, which is what SGLang takes."""
    path = tmp_path / "ellm.toml"
    path.write_text(
        "[serve]\nellm_host_kv_tokens = 2000\nellm_overlap = false\nellm_layer_group = 2\n"
        'ellm_policy_options = {rotate = false}\n[sglang]\nmodel_path = "DIR"\n'
        "port = 31000\nenable_metrics = true\nlog_requests = false\n"
        'served-model-name = "chat"\n'
    )
    said: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: said.append(arguments))
    done = run(
        "--config", str(path), "serve", "--port", "32000", ELLM_SGL_SERVE_ELLM_LAYER_GROUP="1"
    )
    assert done.exit_code == 0, done.output
    [(program, command, _)] = said
    assert program == sys.executable
    line = " ".join(command[3:])
    assert line.startswith(
        "--model-path DIR --port 31000 --enable-metrics --served-model-name chat --port 32000 "
    )
    for flag in (
        "--ellm-policy fcfs",
        "--ellm-host-kv-tokens 2000",
        "--ellm-overlap off",
        "--ellm-layer-group 1",
        '--ellm-policy-options {"rotate": false}',
    ):
        assert flag in line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_command(shell: str) -> None:
    assert "_ELLM_SGL_COMPLETE" in run("completion", shell).stdout


def test_commands_and_options_are_completed() -> None:
    for words, expected in {
        "ellm-sgl si": "simulate",
        "ellm-sgl serve --ellm-pol": "--ellm-p",
    }.items():
        done = CliRunner().invoke(
            main,
            [],
            prog_name="ellm-sgl",
            env={
                "_ELLM_SGL_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
        )
        assert expected in done.output
