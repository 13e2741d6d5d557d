"""The conformance kit: does a policy keep the rules that the server relies on?

    from ellm_sgl.policies.testing import examine

    report = examine(MyPolicy)

In the spirit of scikit-learn's `check_estimator`: named checks over generated states, one report,
and a failing state told in a line that reproduces it. `ellm-sgl policies check NAME` runs the same,
and `parametrize_with_checks` makes each check a test of its own.

What is asked of every policy is what its server needs: valid answers on any state, no change of
the state, the same answers for the same history, no request forgotten, answers in time, and that
more memory never makes it keep less. Fitting the device is asked only of policies whose ratios
answer to memory: for the others (`stock`, `fixed-ratio`) the server's eviction sees to it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ellm_sgl.policies.base import Policy
from ellm_sgl.policies.testing.checks import (
    CHECKS,
    STATES,
    DoesNotApplyError,
    Factory,
    Subject,
    TooSlowError,
    told_of,
)

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
        return {
            "policy": self.policy,
            "ok": self.ok,
            "checks": [asdict(result) for result in self.results],
        }


def check_policy(
    policy: Policy | Factory, *, states: int = STATES, budget_ms: float | None = BUDGET_MS
) -> ConformanceReport:
    """Run every check; for use in a test.

    Args:
        policy, states, budget_ms: as in `examine`.

    Raises:
        AssertionError: some check failed; the message lists each with the failing state.
    """
    report = examine(policy, states=states, budget_ms=budget_ms)
    if not report.ok:
        lines = [f"  {r.name}: {r.detail}" for r in report.failures]
        raise AssertionError(
            f"{report.policy} fails {len(lines)} of {len(report.results)} checks:\n"
            + "\n".join(lines)
        )
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
    results: list[CheckResult] = []
    hopeless = False
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
