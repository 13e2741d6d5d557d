"""The conformance kit as pytest sees it: each check is a test with an id of its own.

After scikit-learn's decorator of the same name: `pytest -k nobody-starves` runs one check of every
policy, and what a policy's author knows to fail is declared, with the reason, where it is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ellm_sgl.policies.base import Policy
from ellm_sgl.policies.testing.checks import (
    CHECKS,
    STATES,
    TIMED,
    BrokenRuleError,
    DoesNotApplyError,
    Factory,
    Subject,
)
from ellm_sgl.policies.testing.conformance import name_of

if TYPE_CHECKING:
    import pytest


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

    def marks(check: str) -> list[pytest.MarkDecorator]:
        if check not in reasons:
            return []
        return [pytest.mark.xfail(reason=reasons[check], strict=True, raises=BrokenRuleError)]

    return pytest.mark.parametrize(
        ("policy", "check"),
        [
            pytest.param(
                policy,
                Check(check, states, budget_ms),
                id=f"{_id_of(policy, place)}-{check}",
                marks=marks(check),
            )
            for place, policy in enumerate(policies)
            for check in CHECKS
            if check != TIMED or budget_ms is not None
        ],
    )


def _id_of(policy: Policy | Factory, place: int) -> str:
    name = name_of(policy)
    return f"policy{place}" if name == "<lambda>" else name
