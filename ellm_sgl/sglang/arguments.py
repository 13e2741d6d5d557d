"""What becomes of each of SGLang's arguments when eLLM is enabled, in one table.

SGLang has several hundred, and a new one may mean anything to memory, batches or rows: a test fails
for a field of `ServerArgs` that the table lacks, so somebody has to read what it does. The rows are
in `arguments.toml`, what later versions have otherwise in the file of theirs (`versions/`);
`docs/sglang-arguments.md` is made from them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from ellm_sgl.sglang.cuda import available
from ellm_sgl.sglang.versions import adapter, adapter_of, installed


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
        if self.field.startswith("_"):  # SGLang's own, without one
            return self.field
        return self.option or "--" + self.field.replace("_", "-")

    def refusal(self, args: Any, defaults: Mapping[str, Any]) -> str | None:
        """Why a server does not start with these arguments, and what to do; None where it does.
        `defaults`: SGLang's, by field."""
        value = getattr(args, self.field)
        if self.when is not None:
            refused = self.when(args)
        else:
            refused = value != defaults[self.field] and value not in self.allowed
        if not refused:
            return None
        told = "" if isinstance(value, bool) else f" {value}"
        return f"{self.flag}{told}: {self.why}; {self.remedy}"


_WHEN: dict[str, Callable[[Any], bool]] = {
    "enable_priority_scheduling": lambda args: bool(
        args.enable_priority_scheduling and not args.disable_priority_preemption
    ),
    "schedule_policy": lambda args: args.schedule_policy in ("random", "shortest-prefill-first"),
    "radix_eviction_policy": lambda args: args.radix_eviction_policy == "tlru",
    "device": lambda args: args.device not in (None, "cuda" if available() else "cpu"),
}
"""Of what is refused in part: asked of all arguments."""


@cache
def table(version: str | None = None) -> dict[str, Argument]:
    """All rows of a version by field, in the order of `arguments.toml`; of the installed one unless
    another is named."""
    differences = adapter_of(version or installed()).arguments
    found: dict[str, Argument] = {}
    if (before := differences.get("after")) is not None:
        found |= table(before)
    else:
        _add(found, tomllib.loads(Path(__file__).with_suffix(".toml").read_text()))
    for field in differences.get("gone", "").split():
        del found[field]
    _add(found, differences)
    return found


def _add(found: dict[str, Argument], source: Mapping[str, Any]) -> None:
    for argument in _rows(source):
        assert argument.field not in found, f"{argument.field} stands in two rows"
        found[argument.field] = argument


def _rows(source: Mapping[str, Any]) -> Iterator[Argument]:
    for kind in Kind:
        for row in source.get(kind.name.lower(), ()):
            yield from _arguments(kind, row)


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
    defaults = adapter().defaults()
    for argument in table().values():
        if argument.kind is not Kind.REFUSED or (resolved and argument.given_only):
            continue
        if said := argument.refusal(args, defaults):
            return said
    return None
