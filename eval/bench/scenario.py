"""What a scenario has to say, and what follows from that unless it says otherwise."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import click

from ellm_sgl.client.process import DEMO_MODEL
from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench.result import (
    SAME_OUTPUT,
    Column,
    MeasurementError,
    Paired,
    Result,
    Table,
    Taken,
)

Say = Callable[[str], None]
"""Told of progress, in one line."""
OPTION = "option"
"""Key of a field's metadata: the option's name (empty: the field's), and what `click.Option` is
given."""


def option(
    default: Any,
    kind: Any = None,
    about: str | None = None,
    *,
    flag: str = "",
    text: Any = None,
    **more: Any,
) -> Any:
    """A field of a scenario that is an option of its command, with click's type and its help.

    Args:
        flag: the option's name, where it is not the field's.
        text: the option's default, where a callback makes the field's of it.
        more: other arguments of `click.Option`.
    """
    shown = default if text is None else text
    given = {"type": kind, "default": shown, "show_default": True, "help": about, **more}
    return field(default=default, metadata={OPTION: (flag, given)})


def rounds_option(default: int, least: int = 1) -> Any:
    """The field `rounds`."""
    return option(default, click.IntRange(least, 10_000))


def model_option() -> Any:
    """The field `model_path`: a model that is sent token ids alone."""
    about = "A local model.  [default: the demo's]"
    return option(str(DEMO_MODEL), about=about, show_default=False)


def check_threads(threads: int) -> None:
    """Of an option `--threads`.

    Raises:
        ConfigError: this process may use fewer cores.
    """
    if threads > (cores := len(os.sched_getaffinity(0))):
        raise ConfigError(f"--threads {threads}: {cores} cores here; give at most as many")


@dataclass(frozen=True)
class Setting:
    """What is compared: a row of the table."""

    name: str
    server: str
    """Name of the server that it is measured on."""
    value: Any = None
    """How that server is set before, in the scenario's own terms."""


@dataclass(frozen=True)
class Scenario(ABC):
    """Every setting gets every load (`cells`) in every round. Fields are the command's options; the
    docstring of its module is the command's help."""

    rounds: int = rounds_option(1)

    columns: ClassVar[Sequence[Column]]
    against: ClassVar[Mapping[str, str]] = {}
    """Settings, and which other one each is held against."""
    reference: ClassVar[str | None] = None
    """The setting whose tokens are the right ones: gives the figure `SAME_OUTPUT`."""
    cell_heading: ClassVar[str] = ""
    """Of the column that tells loads apart; without one there is a single load."""
    cell_form: ClassVar[str] = "{}"
    """How a load is told in that column: a format, of its parts if it is a tuple."""
    anew: ClassVar[bool] = False
    """Every round has servers of its own."""

    def check(self) -> None:  # noqa: B027 (optional)
        """Before anything is started.

        Raises:
            ConfigError: the options make no sense together, or on this machine.
        """

    @abstractmethod
    def starters(self) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        """How each server is started: a `ServerProcess`, but for scenarios that measure without
        one. All stand side by side, and idle ones sleep."""

    def settings(self) -> Sequence[Setting]:
        """In the order of even rounds; odd ones reverse it. Here: each server as it is."""
        return [Setting(name, name) for name in self.starters()]

    def cells(self) -> Sequence[Any]:
        """Loads, each of JSON's types."""
        return ("",)

    def lives(self) -> Sequence[Sequence[Any]]:
        """The cells, in groups for each of which servers are started anew. Here: all are one."""
        return (self.cells(),)

    def title(self, cell: Any) -> str:
        return self.cell_form.format(*(cell if isinstance(cell, tuple) else (cell,)))

    @abstractmethod
    def load(self, cell: Any, seed: int) -> Any:
        """The same for all settings of a round, whose number is the seed."""

    @abstractmethod
    def measure(self, server: Any, setting: Setting, load: Any) -> Taken:
        """One setting under one load."""

    def warm_up(self, name: str, server: Any) -> None:
        """Once after a server's start. Here: a round of its own whose figures are dropped."""
        for cell in self.cells():
            for setting in self.settings():
                if setting.server == name:
                    with suppress(MeasurementError):  # a cold server may be too slow
                        self.measure(server, setting, self.load(cell, self.rounds))

    def finish(self, servers: Mapping[str, Any], result: Result, say: Say) -> Mapping[str, Any]:
        """What else to find out of servers (those of the last round) before they stop."""
        return {}

    def _unheld(self, name: str, result: Result) -> bool:
        """Whether a setting's tokens are held against nobody's."""
        return name == self.reference or self.reference not in result.settings

    def rows(self, result: Result, cell: Any) -> Iterator[tuple[str, ...]]:
        for name in (s.name for s in self.settings() if s.name in result.settings):
            other = self.against.get(name)
            other = other if other in result.settings else None
            yield name, *(
                "" if column.figure == SAME_OUTPUT and self._unheld(name, result)
                else column.show(result, cell, name, other)
                for column in self.columns
            )  # fmt: skip

    def tables(self, result: Result) -> list[Table]:
        """One for all cells."""
        if not result.samples:
            return []
        headings = ("", *(c.heading for c in self.columns))
        if not self.cell_heading:
            return [Table("", headings, tuple(self.rows(result, self.cells()[0])))]
        rows = tuple((self.title(c), *row) for c in self.cells() for row in self.rows(result, c))
        return [Table("", (self.cell_heading, *headings), rows)]

    def notes(self, result: Result) -> list[str]:
        """Sentences below the tables."""
        return []

    def document(self, result: Result) -> dict[str, Any]:
        """The scenario's part of the JSON document."""
        ratios = [
            {"cell": cell, "setting": name, "against": other, "figure": column.figure,
             "inverse": column.inverse, **asdict(column.ratio(result, cell, name, other))}
            for column in self.columns if isinstance(column, Paired)
            for cell in self.cells()
            for name, other in self.against.items() if {name, other} <= result.settings
        ]  # fmt: skip
        return {"samples": [asdict(s) for s in result.samples], "ratios": ratios}

    def plot(self, result: Result, figure: Any) -> None:
        """Draw on a `matplotlib.figure.Figure`. Here: the first column of every round."""
        column = self.columns[0]
        for panel, cell in self.panels(figure):
            for name in (s.name for s in self.settings()):
                values = [column.scale * v for v in result.values(cell, name, column.figure)]
                panel.plot([name] * len(values), values, "o", alpha=0.6)
            panel.set(title=self.title(cell), ylabel=column.heading.replace("\n", " "))
            panel.set_ylim(bottom=0)

    def panels(self, figure: Any) -> list[tuple[Any, Any]]:
        """A `matplotlib.axes.Axes` for each cell, one below the other."""
        cells = self.cells()
        return list(zip(figure.subplots(len(cells), 1, squeeze=False)[:, 0], cells, strict=True))
