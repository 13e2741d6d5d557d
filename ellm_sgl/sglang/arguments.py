"""What becomes of each of SGLang's arguments when eLLM is enabled, in one table.

SGLang has several hundred, and a new one may mean anything to memory, batches or rows: a test fails
for a field of `ServerArgs` that the table lacks, so somebody has to read what it does. The rows are
in `arguments.toml`; `docs/sglang-arguments.md` is made from them.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from ellm_sgl.sglang.cuda import available


class Kind(Enum):
    """What eLLM does about an argument."""

    WORKS = "works"
    """A test shows it."""
    ADAPTED = "set by eLLM"
    """Or by the CPU platform; other values are refused where they are given."""
    REFUSED = "refused"
    """In whole or in part: some values, or together with others."""
    NO_BEARING = "no bearing"
    """On anything that eLLM does."""


@dataclass(frozen=True)
class Argument:
    """One field of SGLang's `ServerArgs`."""

    field: str
    kind: Kind
    why: str
    tests: str = ""
    """Of what works, or is not refused: the test that shows it, as "path::function"."""
    allowed: tuple[Any, ...] = ()
    """Of what is refused: values that are not, beside SGLang's default."""
    when: Callable[[Any], bool] | None = None
    """Of what is refused: asked of all arguments, where the value alone does not decide."""
    remedy: str = "leave it out"
    given_only: bool = False
    """Refused only as given: SGLang sets it itself when it resolves its arguments."""
    option: str = ""
    """As on the command line, where the field's name is not what users know."""

    @property
    def flag(self) -> str:
        return self.option or "--" + self.field.replace("_", "-")

    def refusal(self, args: Any) -> str | None:
        """Why a server does not start with these arguments, and what to do; None where it does."""
        value = getattr(args, self.field)
        if self.when is not None:
            refused = self.when(args)
        else:
            refused = value != _default(type(args), self.field) and value not in self.allowed
        if not refused:
            return None
        told = "" if isinstance(value, bool) else f" {value}"
        return f"{self.flag}{told}: {self.why}; {self.remedy}"


def _default(kind: type, field: str) -> Any:
    found = next(f for f in dataclasses.fields(kind) if f.name == field)
    if found.default_factory is not dataclasses.MISSING:
        return found.default_factory()
    return found.default


_WHEN: dict[str, Callable[[Any], bool]] = {
    "enable_priority_scheduling": lambda args: bool(
        args.enable_priority_scheduling and not args.disable_priority_preemption
    ),
    "schedule_policy": lambda args: args.schedule_policy == "random",
    "device": lambda args: args.device not in (None, "cuda" if available() else "cpu"),
}
"""Of what is refused in part: asked of all arguments."""


@cache
def table() -> dict[str, Argument]:
    """All rows by field, in the order of `arguments.toml`."""
    text = Path(__file__).with_suffix(".toml").read_text()
    found: dict[str, Argument] = {}
    for kind, rows in tomllib.loads(text).items():
        for argument in (each for row in rows for each in _arguments(Kind[kind.upper()], row)):
            assert argument.field not in found, f"{argument.field} stands in two rows"
            found[argument.field] = argument
    return found


def _arguments(kind: Kind, row: dict[str, Any]) -> Iterator[Argument]:
    """The arguments of one row of `arguments.toml`."""
    why = row.get("why", "")
    if "without" in row:
        why = f"means nothing without {row['without']}, which is refused"
    for field in row["fields"].split():
        yield Argument(
            field,
            kind,
            why,
            tests=row.get("tests", ""),
            allowed=tuple(row.get("allowed", {}).get(field, ())),
            when=_WHEN.get(field),
            remedy=row.get("remedy", Argument.remedy),
            given_only=row.get("given_only", False),
            option=row.get("option", {}).get(field, ""),
        )


def refusal(args: Any, resolved: bool) -> str | None:
    """Why a server does not start with these arguments, and what to do; None where it does.

    Args:
        args: SGLang's `ServerArgs`.
        resolved: whether SGLang has resolved them: it sets some of them itself.
    """
    for argument in table().values():
        if argument.kind is not Kind.REFUSED or (resolved and argument.given_only):
            continue
        if said := argument.refusal(args):
            return said
    return None
