"""Every numeric option of every command line refuses what is no number in its range."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from click.types import FloatParamType, IntParamType

import ellm_sgl
from ellm_sgl.config.click_types import FiniteRange
from ellm_sgl.config.ellm_config import _NUMBERS
from ellm_sgl.config.flags import FLAGS
from ellm_sgl.serve.cli import main

SOURCES = Path(ellm_sgl.__file__).parent
NO_NUMBERS = (
    "nan",
    "NaN",
    "inf",
    "-inf",
    "Infinity",
    "-1e308",
    "1e308",
    "1e400",
    "1" * 5000,
    "x",
    "",
)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """A command, or those of a group."""
    if isinstance(command, click.Group):
        for each, inner in command.commands.items():
            yield from leaves(inner, f"{name} {each}")
    else:
        yield name, command


def every_command() -> dict[str, click.Command]:
    """`ellm-sgl`, and whatever else in the package is run by `python -m`."""
    found = dict(leaves(main, "ellm-sgl"))
    for source in sorted((SOURCES / "eval").rglob("*.py")):
        if "@click.command" not in source.read_text():
            continue
        name = ".".join(("ellm_sgl", *source.relative_to(SOURCES).with_suffix("").parts))
        for each in vars(importlib.import_module(name)).values():
            if isinstance(each, click.Command):
                found[name] = each
    return found


COMMANDS = every_command()
OPTIONS = [
    pytest.param(command, option, id=f"{name} {option.opts[0]}")
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option.type, IntParamType | FloatParamType)
]


def beyond(kind: Any) -> list[str]:
    """The nearest numbers outside of a range."""
    if isinstance(kind, FiniteRange):
        low, high = float(kind.min), float(kind.max)  # type: ignore[arg-type]  # has both
        return [
            repr(low if kind.min_open else math.nextafter(low, -math.inf)),
            repr(high if kind.max_open else math.nextafter(high, math.inf)),
        ]
    return [str(kind.min - 1), str(kind.max + 1), str(10**30), str(-(10**30)), "1.5"]


def required(command: click.Command, other: click.Parameter) -> list[str]:
    """Arguments without which the command does not start."""
    given = []
    for each in command.params:
        if each.required and each is not other:
            given += [each.opts[0], "x"] if isinstance(each, click.Option) else ["x"]
    return given


def assert_refused(done: Result, option: str, value: str) -> None:
    lines = done.stderr.splitlines()
    errors = [line for line in lines if "rror:" in line]
    assert done.exit_code == 2, f"{option} {value}: {done.output}"
    assert isinstance(done.exception, SystemExit) and done.stdout == ""
    assert errors == lines[-1:] and errors[0].startswith("Error: ") and option in errors[0]


def test_all_commands_are_found() -> None:
    assert {"ellm-sgl simulate", "ellm-sgl policies check", "ellm-sgl kernels bench"} <= {*COMMANDS}
    assert {"ellm-sgl compare", "ellm-sgl bench load-sweep", "ellm-sgl bench compare"} <= {
        *COMMANDS
    }
    assert {"ellm_sgl.eval.soak", "ellm_sgl.eval.train_demo_model"} <= {*COMMANDS}
    assert len(OPTIONS) > 70


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_what_is_out_of_range_is_refused_in_one_sentence(
    command: click.Command, option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(**given: Any) -> None:
        raise AssertionError(f"{option.opts[0]}: ran with {given}")

    kind: Any = option.type
    assert isinstance(kind, click.IntRange | FiniteRange), f"{option.opts[0]}: give it a range"
    assert kind.min is not None and kind.max is not None, f"{option.opts[0]}: give both its ends"
    monkeypatch.setattr(command, "callback", runs)
    for value in (*NO_NUMBERS, *beyond(kind)):
        done = CliRunner().invoke(command, [*required(command, option), option.opts[0], value])
        assert_refused(done, option.opts[0], value)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.field in _NUMBERS], ids=lambda f: f.field)
def test_a_setting_out_of_range_starts_no_server(
    flag: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: Any) -> None:
        raise AssertionError(f"{flag.option}: a server starts")

    monkeypatch.setattr(os, "execve", starts)
    for value in (*NO_NUMBERS, "-1", str(10**30)):
        arguments = ["serve", "--ellm-policy", "fixed-ratio", flag.option, value]
        assert_refused(CliRunner().invoke(main, arguments), flag.option, value)


def test_every_numeric_setting_has_a_range() -> None:
    numeric = {flag.field for flag in FLAGS if flag.parse in (int, float)}
    assert numeric == _NUMBERS.keys()


@pytest.mark.parametrize("text", ['{"loss": 1e999}', '{"loss": NaN}', "[" * 5000, "1" * 5000])
def test_options_of_policies_hold_finite_numbers(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("a server starts"))
    for arguments in (
        ["serve", "--ellm-policy-options", text],
        ["simulate", "--options", text],
        ["policies", "check", "fcfs", "--options", text],
        ["policies", "bench", "fcfs", "--options", text],
    ):
        assert_refused(CliRunner().invoke(main, arguments), arguments[-2], text)


def test_the_ends_of_a_range_are_accepted() -> None:
    @click.command()
    @click.option("--share", type=FiniteRange(0, 1, high_open=True))
    @click.option("--above", type=FiniteRange(0, 1, low_open=True))
    def show(share: float, above: float) -> None:
        click.echo(f"{share!r} {above!r}")

    for arguments, shown in ((["0", "1"], "0.0 1.0"), (["0.5", "1e-9"], "0.5 1e-09")):
        done = CliRunner().invoke(show, ["--share", arguments[0], "--above", arguments[1]])
        assert (done.exit_code, done.stdout) == (0, shown + "\n")
