"""`ellm-sgl --config FILE`: a TOML file with what would be said on the command line.

A table for each command, with its options by the names of their flags, and `[sglang]` with SGLang's
arguments for `serve`. Click takes what the command line and the environment do not say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ellm_sgl.config import ConfigError
from ellm_sgl.config.flags import as_text, instead_of
from ellm_sgl.config.ranges import shown

SGLANG = "sglang"
"""The table with SGLang's arguments."""


def name_of(option: click.Option) -> str:
    """What files and the environment call an option: its flag, whatever the code does."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def take_from_environment(command: click.Command, prefix: str) -> None:
    """Let each option of `command`, and of those below it, be given as `prefix` and its names."""
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            take_from_environment(each, f"{prefix}_{name.upper()}".replace("-", "_"))
    for option in command.params:
        if isinstance(option, click.Option) and option.expose_value:  # not --version
            known = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
            option.envvar = [*known, f"{prefix}_{name_of(option).upper()}"]


def read(path: Path, commands: click.Group) -> tuple[dict[str, Any], list[str]]:
    """Defaults for the commands' options, and SGLang's arguments as a command line.

    Raises:
        ConfigError: the file cannot be read, names what does not exist, or has a value that its
            option cannot take.
    """
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # no TOML, no text, or a number of 5,000 digits
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: nested too deeply; give it flatter") from None
    arguments = found.pop(SGLANG, {})
    return _defaults(str(path), found, commands, (SGLANG,)), _sglang(str(path), arguments)


def _defaults(
    where: str, table: Mapping[str, Any], command: click.Command, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Of one table: of a group the tables of its commands, of a command its options.

    Args:
        also: what there may be besides.
    """
    if isinstance(command, click.Group):
        tables: dict[str, Any] = {}
        for name, value in table.items():
            _check_known(where, name, (*command.commands, *also))
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} is a command; write a table, [{name}]")
            tables[name] = _defaults(f"{where}: [{name}]", value, command.commands[name])
        return tables
    options = {name_of(p): p for p in command.params if isinstance(p, click.Option)}
    values = {}
    for written, value in table.items():
        name = written.replace("-", "_")
        _check_known(where, name, tuple(options))
        option = options[name]
        values[str(option.name)] = _value(f"{where} {written}", value, option)
    return values


def _check_known(where: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{where}: {shown(name)} is not known here; {instead_of(name, known)}")


def _value(where: str, value: object, option: click.Option) -> Any:
    """As click takes it: it checks types and ranges as if it came from the command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} {shown(value)}: give true or false")
        return value
    try:
        if option.multiple:
            return [as_text(each) for each in (value if isinstance(value, list) else [value])]
        return as_text(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} {shown(value)}: give a text, a number or a boolean") from None


def _sglang(where: str, arguments: object) -> list[str]:
    """The table as a command line: true is a flag alone, false nothing, a list several values."""
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: {SGLANG} {shown(arguments)}: write a table, [{SGLANG}]")
    if not arguments:
        return []
    from ellm_sgl.sglang.arguments import table

    known = {name for a in table().values() for name in (a.field, a.flag[2:].replace("-", "_"))}
    line: list[str] = []
    for written, value in arguments.items():
        name = written.replace("-", "_")
        if name not in known:
            instead = instead_of(name, tuple(sorted(known)))
            raise ConfigError(f"{where}: {shown(written)} is no argument of SGLang's; {instead}")
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        try:
            line += ["--" + name.replace("_", "-"), *map(as_text, values)]
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: {written} {shown(value)}: give texts or numbers") from None
    return line
