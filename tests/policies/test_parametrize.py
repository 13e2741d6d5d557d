"""A pytest id for each check of each policy; expected failures are xfails, and strict."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ellm_sgl.policies import Fcfs, FixedRatio, Stock
from ellm_sgl.policies.testing import CHECKS, parametrize_with_checks

pytest_plugins = ["pytester"]

MODULE = """
from ellm_sgl.policies import Batch, Stock
from ellm_sgl.policies.testing import parametrize_with_checks

class NewestFirst(Stock):
    def batch(self, state):
        return Batch(admit=tuple(reversed(range(len(state.waiting)))))

class CannotBeMade(Stock):
    def __init__(self):
        raise TypeError("what is missing?")

KNOWN = {"nobody-starves": "new requests go first"}

@parametrize_with_checks([NewestFirst], states=2)
def test_undeclared(policy, check):
    check(policy)

@parametrize_with_checks([NewestFirst, CannotBeMade], expected_failures=KNOWN, states=2)
def test_declared(policy, check):
    check(policy)

@parametrize_with_checks([Stock], expected_failures={"answers-are-valid": "so I thought"}, states=2)
def test_wrongly_declared(policy, check):
    check(policy)
"""


def ids(*arguments: Any, **options: Any) -> list[str]:
    return [case.id for case in parametrize_with_checks(*arguments, **options).mark.args[1]]


def test_an_id_for_each_check_of_each_policy() -> None:
    found = ids([Stock, FixedRatio], budget_ms=5.0)
    assert found == [f"{policy}-{check}" for policy in ("Stock", "FixedRatio") for check in CHECKS]


def test_without_a_budget_nothing_is_timed() -> None:
    assert ids([Stock]) == [f"Stock-{check}" for check in CHECKS if check != "answers-in-time"]


def test_policies_are_told_apart_by_their_options() -> None:
    policies = [partial(Fcfs, True, rotate=True), Stock(), lambda: FixedRatio(0.5)]
    named = {i.removesuffix("-nobody-starves") for i in ids(policies) if "starves" in i}
    assert named == {"Fcfs(True, rotate=True)", "Stock", "policy2"}


def test_an_expected_failure_of_an_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no check nobody-starvs; there are .*nobody-starves"):
        parametrize_with_checks([Stock], expected_failures={"nobody-starvs": "why?"})


def test_outcomes_as_pytest_tells_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODULE)
    run = pytester.inline_run("-p", "no:cacheprovider", "-k", "starves or valid or fit")
    passed, skipped, failed = (
        {report.nodeid.partition("::")[2]: report for report in reports}
        for reports in run.listoutcomes()
    )
    assert passed.keys() == {
        "test_undeclared[NewestFirst-answers-are-valid]",
        "test_declared[NewestFirst-answers-are-valid]",
        "test_wrongly_declared[Stock-nobody-starves]",
    }
    assert skipped["test_declared[NewestFirst-nobody-starves]"].wasxfail == "new requests go first"
    unasked = "test_undeclared[NewestFirst-targets-fit-the-device]"
    assert "do not depend on memory" in str(skipped[unasked].longrepr)
    assert "has waited 60" in str(failed["test_undeclared[NewestFirst-nobody-starves]"].longrepr)
    assert "so I thought" in str(failed["test_wrongly_declared[Stock-answers-are-valid]"].longrepr)
    made = "test_declared[CannotBeMade-nobody-starves]"
    assert "what is missing?" in str(failed[made].longrepr)  # no rule: it was not expected
