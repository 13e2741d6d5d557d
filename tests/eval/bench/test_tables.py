"""Tables of the docs come from docs/results/, and the docs say what the documents say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ellm_sgl.config import ConfigError
from ellm_sgl.eval.bench.tables import rewrite, rewritten
from ellm_sgl.serve.cli import main

DOCS = Path(__file__).resolve().parents[3] / "docs"
DOCUMENT: dict[str, Any] = {
    "command": "ellm-sgl bench overhead --rounds 9",
    "date": "2026-11-03T09:00:00+00:00",
    "machine": {"processor": "Some CPU", "cores": 2},
    "versions": {"python": "3.11.1", "sglang": "0.5.17", "torch": "2.13.0"},
    "tables": [
        {"title": "", "headings": ["load", "", "tokens/s\nmedian"], "rows": [["light", "a|b", "7"]]}
    ],
    "notes": ["Outputs were equal."],
}
PAGE = "# Page\n\n<!-- results: some -->\nold\n<!-- end -->\n\nand on.\n"
WRITTEN = """# Page

<!-- results: some -->
| load |  | tokens/s median |
| --- | --- | ---: |
| light | a\\|b | 7 |

Outputs were equal.

`ellm-sgl bench overhead --rounds 9`, 3 November 2026: 2 cores of Some CPU; sglang 0.5.17, torch \
2.13.0.
<!-- end -->

and on.
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "some.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path


def test_the_docs_say_what_the_results_say() -> None:
    differing = rewrite(DOCS, write=False)
    assert differing == [], "run `ellm-sgl bench tables`"


def test_every_result_is_shown_somewhere() -> None:
    pages = "".join(file.read_text() for file in DOCS.glob("*.md"))
    for file in (DOCS / "results").glob("*.json"):
        assert f"<!-- results: {file.stem} -->" in pages, f"{file.name}: no page shows it"


def test_a_table_is_written_between_its_markers(docs: Path) -> None:
    page = docs / "page.md"
    assert rewrite(docs, write=False) == [page] and page.read_text() == PAGE
    assert rewrite(docs) == [page] and page.read_text() == WRITTEN
    assert rewrite(docs) == [], "nothing more to do"


def test_a_changed_figure_is_a_difference(docs: Path) -> None:
    rewrite(docs)
    changed = json.dumps(DOCUMENT).replace('"7"', '"8"')
    (docs / "results" / "some.json").write_text(changed)
    done = CliRunner().invoke(main, ["bench", "tables", "--docs", str(docs), "--check"])
    assert done.exit_code == 1 and "differs" in done.output and "page.md" in done.output
    assert CliRunner().invoke(main, ["bench", "tables", "--docs", str(docs)]).exit_code == 0
    assert "| 8 |" in (docs / "page.md").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- results: none -->\n<!-- end -->", "none.json"),
        ("<!-- results: other -->\n<!-- end -->", "other.json"),
        ("<!-- results: some -->\n", "page: every"),
        ("<!-- end -->\n<!-- results: some -->\n", "page: every"),
    ],
)
def test_what_cannot_be_written_is_named(docs: Path, text: str, problem: str) -> None:
    (docs / "results" / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match=problem):
        rewritten(text, docs / "results", "page")
