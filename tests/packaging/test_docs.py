"""The documents: links lead somewhere, commands and messages are real, pages stay short."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import click
import pytest

from ellm_sgl.config.flags import FLAGS
from ellm_sgl.serve.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "SECURITY.md", "docs/*.md", "requirements/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)
LONGEST = {"README.md": 130, "docs/performance.md": 150, "docs/evaluation.md": 150}
DIARY = re.compile(
    r"\b(yesterday|tonight|overnight|nights?|wanted|other hours|(the )?day before|this morning"
    r"|that (morning|afternoon|evening)|what was asked|figures asked for)\b",
    re.IGNORECASE,
)
"""Of when somebody wrote something, and for whom: neither is the reader's."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VALUE = "…"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Without blocks of code."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Names of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(("page", "lines"), LONGEST.items(), ids=LONGEST)
def test_pages_stay_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= lines


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_is_a_diary(page: Path) -> None:
    assert [found.group() for found in DIARY.finditer(page.read_text())] == []


def commands(page: Path) -> list[str]:
    """What it says after `ellm-sgl`, in blocks of shell and in running text."""
    text = page.read_text()
    shell = [block for kind, block in FENCE.findall(text) if kind == "console"]
    lines = "".join(shell).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`]+)`", prose(page))
    pattern = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?ellm-sgl ([^#\n]*)")
    return [found.group(1) for text in (*lines, *spans) if (found := pattern.match(text))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    for said in commands(page):
        command: click.Command = main
        words = said.split()
        while isinstance(command, click.Group) and words and not words[0].isupper():  # NAME
            assert words[0] in command.commands, f"ellm-sgl {said}"
            command = command.commands[words.pop(0)]
        if command.name == "serve" or isinstance(command, click.Group):
            continue  # takes SGLang's options as well
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, f"ellm-sgl {said}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_exist(page: Path) -> None:
    for module in re.findall(r"python -m (ellm_sgl[\w.]*|tests[\w.]*)", page.read_text()):
        named = module.rstrip(".").removesuffix(".NAME")
        assert importlib.util.find_spec(named) is not None, module


def test_the_guide_has_every_setting() -> None:
    table = (
        (ROOT / "docs/guide.md").read_text().partition("### Every setting")[2].partition("\n## ")[0]
    )
    told = re.findall(r"^\| `(--ellm-[a-z-]+) ", table, re.MULTILINE)
    assert sorted(told) == sorted(["--ellm-policy", *(flag.option for flag in FLAGS)])


def messages() -> str:
    """Every text in the program, one a line, with `VALUE` for what it fills in."""
    found = [(ROOT / "ellm_sgl/sglang/arguments.toml").read_text()]
    for folder in ("ellm_sgl", "policies"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                found.append("".join(map(_text, parts)))
    return "\n".join(found)


def _text(part: ast.AST) -> str:
    if isinstance(part, ast.FormattedValue):
        return VALUE
    text = part.value if isinstance(part, ast.Constant) else ""
    return re.sub(r"%[sd]", VALUE, text) if isinstance(text, str) else ""


def test_the_guide_quotes_the_programs_messages() -> None:
    table = (ROOT / "docs/guide.md").read_text().partition("## Troubleshooting")[2]
    rows = re.findall(r"^\| `([^`]+)`([^|]*)\|", table, re.MULTILINE)
    quoted = [text for text, where in rows if "SGLang" not in where]
    assert len(quoted) > 20
    said = messages()
    assert [text for text in quoted if text not in said] == []
