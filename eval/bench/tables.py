"""Tables of the docs, generated from the JSON documents of `docs/results/`.

Between `<!-- results: NAME -->` and `<!-- end -->` stands what `NAME.json` says: its tables, its
notes, and when, on what and by which command it was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ellm_sgl.config import ConfigError

BEGIN, END = "<!-- results: {} -->", "<!-- end -->"
_PLACE = re.compile(r"<!-- results: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
_MARKS = re.compile(r"<!-- (?:results: \S+|end) -->")


def rewrite(docs: Path, *, write: bool = True) -> list[Path]:
    """Bring every `*.md` of a folder into line with its `results/`.

    Returns:
        The files that differed.

    Raises:
        ConfigError: a document is missing or is none, or a marker has no partner.
    """
    changed = []
    for file in sorted(docs.glob("*.md")):
        before = file.read_text()
        after = rewritten(before, docs / "results", str(file))
        if after != before:
            changed.append(file)
            if write:
                file.write_text(after)
    return changed


def rewritten(text: str, results: Path, name: str) -> str:
    """A page with its tables written anew; `name` is for messages."""
    if len(_MARKS.findall(text)) != 2 * len(_PLACE.findall(text)):
        raise ConfigError(f"{name}: every {BEGIN.format('NAME')} needs its {END}, and nothing else")

    def table(found: re.Match[str]) -> str:
        document = _read(results / f"{found[1]}.json")
        return f"{BEGIN.format(found[1])}\n{markdown(document)}\n{END}"

    return _PLACE.sub(table, text)


def markdown(document: Mapping[str, Any]) -> str:
    """A document's tables and notes, and its origin."""
    return "\n\n".join([*_tables(document), *document["notes"], _origin(document)])


def _tables(document: Mapping[str, Any]) -> Iterator[str]:
    for table in document["tables"]:
        if table["title"]:
            yield f"**{table['title']}**"
        headings = table["headings"]
        names = headings.index("") + 1 if "" in headings else 1
        rules = ["---" if place < names else "---:" for place in range(len(headings))]
        yield "\n".join(map(_row, (headings, rules, *table["rows"])))


def _row(cells: Any) -> str:
    plain = (str(cell).replace("-\n", "").replace("\n", " ").replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _origin(document: Mapping[str, Any]) -> str:
    day = datetime.fromisoformat(document["date"])
    machine, versions = document["machine"], document["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in versions if name != "python")
    return (
        f"`{document['command']}`, {day.day} {day:%B %Y}: {machine['cores']} cores of "
        f"{machine['processor']}; {named}."
    )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text())
        if not {"tables", "notes", "date", "machine", "versions", "command"} <= found.keys():
            raise ValueError("its keys are not those of `ellm-sgl bench --json`")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: no document of `ellm-sgl bench --json`: {error}") from None
    assert isinstance(found, dict)
    return found
