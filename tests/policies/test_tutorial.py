"""docs/policies.md: its code runs, in order, and prints what the page says."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ellm_sgl.policies import Policy
from ellm_sgl.policies.base import ALL_THREADS
from ellm_sgl.policies.registry import GROUP
from ellm_sgl.policies.testing import CHECKS
from ellm_sgl.policies.work_split import WARP

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def tutorial() -> dict[str, Any]:
    """The names that the page's Python blocks define, and what they print."""
    printed: list[str] = []

    def show(*values: object, sep: str = " ") -> None:
        printed.append(sep.join(map(str, values)))

    names: dict[str, Any] = {"__name__": "tutorial", "print": show}
    for block in blocks("python"):
        exec(compile(block, "docs/policies.md", "exec"), names)
    return names | {"printed": printed}


@pytest.mark.slow
def test_it_prints_what_the_page_says(tutorial: dict[str, Any]) -> None:
    [shown] = blocks("text")
    assert " ".join(tutorial["printed"]).split() == shown.split()


def outcomes(test: Any) -> Iterator[tuple[str, str]]:
    """Id and outcome of each case of a test of the page, as pytest would have them."""
    for case in test.pytestmark[0].args[1]:
        try:
            test(*case.values)
        except pytest.skip.Exception:
            yield case.id, "skipped"
        except AssertionError:
            yield case.id, "xfailed" if case.marks else "failed"
        else:
            yield case.id, "failed" if case.marks else "passed"


@pytest.mark.slow
def test_its_policies_keep_the_rules(tutorial: dict[str, Any]) -> None:
    found = dict(outcomes(tutorial["test_it_keeps_the_rules"]))
    timed, promised, fits = "answers-in-time", "idle-without-pressure", "targets-fit-the-device"
    skipped = {
        f"ShortestFirst-{promised}", f"ShortestFirst-{fits}", f"EvenShare-{promised}",
    }  # fmt: skip
    assert found == {
        f"{policy}-{check}": "skipped" if f"{policy}-{check}" in skipped else "passed"
        for policy in ("ShortestFirst", "EvenShare")
        for check in CHECKS
        if check != timed
    }


@pytest.mark.slow
def test_its_expected_failure_fails(tutorial: dict[str, Any]) -> None:
    found = dict(outcomes(tutorial["test_almost_no_ageing"]))
    assert found.pop("policy0-nobody-starves") == "xfailed"
    assert set(found.values()) == {"passed", "skipped"}


def test_its_entry_point_names_its_policy(tutorial: dict[str, Any]) -> None:
    [block] = blocks("toml")
    points = tomllib.loads(block)["project"]["entry-points"][GROUP]
    assert [value.partition(":") for value in points.values()] == [
        ("shortest_first", ":", "ShortestFirst")
    ]
    assert issubclass(tutorial["ShortestFirst"], Policy)


def test_the_rules_are_all_there() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \| ", PAGE.partition("## The rules")[2].partition("##")[0],
                      re.MULTILINE) == list(CHECKS)  # fmt: skip
    assert f"δ a multiple of {WARP}, {WARP} to {ALL_THREADS - WARP}" in PAGE
