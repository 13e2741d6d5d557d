"""What becomes of each of SGLang's arguments when eLLM is enabled, in one table.

SGLang has several hundred, and a new one may mean anything to memory, batches or rows: a test fails
for a field of `ServerArgs` that the table lacks, so somebody has to read what it does. The rows are
in `argument_rows.py` and `refused_rows.py`; `docs/sglang-arguments.md` is made from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
    """Of what works: the test that shows it, as "path::function"."""
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


def works(fields: str, tests: str, why: str = "") -> Iterator[Argument]:
    """Rows of `fields`, names with spaces between."""
    for field in fields.split():
        yield Argument(field, Kind.WORKS, why, tests=f"tests/{tests}")


def adapted(field: str, why: str) -> Iterator[Argument]:
    yield Argument(field, Kind.ADAPTED, why)


def no_bearing(fields: str, why: str) -> Iterator[Argument]:
    for field in fields.split():
        yield Argument(field, Kind.NO_BEARING, why)


def refused(fields: str, why: str, *allowed: Any, **more: Any) -> Iterator[Argument]:
    """`allowed`: values that are not refused, beside SGLang's default."""
    for field in fields.split():
        yield Argument(field, Kind.REFUSED, why, allowed=allowed, **more)


def table() -> dict[str, Argument]:
    """All rows by field."""
    from ellm_sgl.sglang.argument_rows import ROWS
    from ellm_sgl.sglang.refused_rows import REFUSED

    rows = [*ROWS, *REFUSED]
    found = {row.field: row for row in rows}
    assert len(found) == len(rows), "an argument stands in two rows"
    return found


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
