"""The conformance kit: does a policy keep the rules that the server relies on?

    from ellm_sgl.policies.testing import examine

    report = examine(MyPolicy)

In the spirit of scikit-learn's `check_estimator`: named checks over generated states, one report,
and a failing state told in a line that reproduces it. `ellm-sgl policies check NAME` runs the same.
`parametrize_with_checks`, named after scikit-learn's, makes each check a pytest test of its own:
`-k nobody-starves` runs one check of every policy, and what a policy's author knows to fail is
declared, with the reason, where it is tested.

What is asked of every policy is what its server needs: valid answers on any state, no change of
the state, the same answers for the same history, no request forgotten, answers in time, and that
more memory never makes it keep less. Fitting the device is asked only of policies whose ratios
answer to memory: for the others (`stock`, `fixed-ratio`) the server's eviction sees to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ellm_sgl.policies.base import Policy
from ellm_sgl.policies.testing.checks import (
    CHECKS,
    STATES,
    TIMED,
    BrokenRuleError,
    DoesNotApplyError,
    Factory,
    Subject,
    TooSlowError,
    told_of,
)

if TYPE_CHECKING:
    import pytest

BUDGET_MS = 5.0
"""As the server's --ellm-policy-budget-ms."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one named check."""

    name: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    detail: str = ""
    """Failed: the rule and the state. Skipped: why."""
    seconds: float = 0.0


@dataclass(frozen=True)
class ConformanceReport:
    """All checks of one policy."""

    policy: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        return tuple(r for r in self.results if r.outcome == "failed")

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(result) for result in self.results]
        return {"policy": self.policy, "ok": self.ok, "checks": checks}


def check_policy(
    policy: Policy | Factory, *, states: int = STATES, budget_ms: float | None = BUDGET_MS
) -> ConformanceReport:
    """`examine`, for use in a test.

    Raises:
        AssertionError: some check failed; the message lists each with the failing state.
    """
    report = examine(policy, states=states, budget_ms=budget_ms)
    if not report.ok:
        count = f"{len(report.failures)} of {len(report.results)}"
        lines = [f"  {r.name}: {r.detail}" for r in report.failures]
        raise AssertionError("\n".join((f"{report.policy} fails {count} checks:", *lines)))
    return report


def examine(
    policy: Policy | Factory, *, states: int = STATES, budget_ms: float | None = BUDGET_MS
) -> ConformanceReport:
    """Run every check and report; raises nothing for a policy that fails.

    Args:
        policy: a class, or whatever makes a fresh instance without arguments; an instance that
            has not been asked yet is copied.
        states: generated states per check.
        budget_ms: most milliseconds for the three answers with 256 running and 1,024 waiting
            requests, in the median; None leaves that check out (for machines too busy to time).
    """
    subject = Subject.of(policy, states, budget_ms)
    results, hopeless = [], False
    for name, check in CHECKS.items():
        start = time.perf_counter()
        outcome, detail = "passed", ""
        try:
            if hopeless:
                raise DoesNotApplyError("too slow to be put through this check")
            check(subject)
        except DoesNotApplyError as reason:
            outcome, detail = "skipped", str(reason)
        except TooSlowError as failure:
            outcome, detail, hopeless = "failed", str(failure), failure.hopeless
        except Exception as failure:
            outcome, detail = "failed", told_of(failure)
        results.append(CheckResult(name, outcome, detail, time.perf_counter() - start))
    return ConformanceReport(name_of(policy), tuple(results))


def name_of(policy: Policy | Factory) -> str:
    """A policy's name in reports: `Fcfs`, or `Fcfs(rotate=True)` of a `functools.partial`."""
    if isinstance(policy, Policy):
        return type(policy).__name__
    if isinstance(policy, partial):
        values = [repr(value) for value in policy.args]
        values += [f"{name}={value!r}" for name, value in policy.keywords.items()]
        return f"{name_of(policy.func)}({', '.join(values)})"
    return getattr(policy, "__name__", repr(policy))


@dataclass(frozen=True)
class Check:
    """One check by name; call it with a policy."""

    name: str
    """As in `CHECKS`."""
    states: int = STATES
    """Generated states to try."""
    budget_ms: float | None = None
    """As in `examine`."""

    def __call__(self, policy: Policy | Factory) -> None:
        """Run it, within a test: where it does not apply, the test is skipped with the reason.

        Raises:
            AssertionError: the policy breaks the rule; the message names the state.
        """
        import pytest

        try:
            CHECKS[self.name](Subject.of(policy, self.states, self.budget_ms))
        except DoesNotApplyError as reason:
            pytest.skip(str(reason))


def parametrize_with_checks(
    policies: Sequence[Policy | Factory],
    *,
    expected_failures: Mapping[str, str] | None = None,
    states: int = STATES,
    budget_ms: float | None = None,
) -> pytest.MarkDecorator:
    """A decorator that runs a test once for each policy and check::

        @parametrize_with_checks([ShortestFirst, partial(ShortestFirst, tokens_per_second=50)])
        def test_it_keeps_the_rules(policy, check):
            check(policy)

    The ids are like `ShortestFirst-nobody-starves`. A lambda has no name: it is `policy` and its
    place in the list, from 0.

    Args:
        policies: classes, or whatever makes a fresh instance without arguments, or instances that
            have not been asked yet: these are copied.
        expected_failures: check name to the reason why all of these policies fail it. Such a test
            is an xfail, and fails once the policy passes.
        states: generated states per check.
        budget_ms: as in `examine`. Unless given there is no `answers-in-time`: machines that run
            tests are busy.

    Raises:
        ValueError: `expected_failures` names a check that does not exist.
    """
    import pytest

    reasons = dict(expected_failures or {})
    if unknown := sorted(reasons.keys() - CHECKS.keys()):
        raise ValueError(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")

    marks = {
        check: pytest.mark.xfail(reason=reason, strict=True, raises=BrokenRuleError)
        for check, reason in reasons.items()
    }
    cases = []
    for place, policy in enumerate(policies):
        name = name_of(policy).replace("<lambda>", f"policy{place}")
        for check in CHECKS:
            if check != TIMED or budget_ms is not None:
                called = Check(check, states, budget_ms)
                cases.append(
                    pytest.param(policy, called, id=f"{name}-{check}", marks=marks.get(check, ()))
                )
    return pytest.mark.parametrize(("policy", "check"), cases)
