"""For authors of policies: the conformance kit, and states to try a policy on.

- `parametrize_with_checks` makes each check a test of its own; `check_policy` runs all of them in
  one, `examine` reports instead of raising.
- `make_state` and `requests` build a state; `random_state` draws one.
"""

from ellm_sgl.policies.testing.checks import CHECKS, BrokenRuleError, Factory
from ellm_sgl.policies.testing.conformance import (
    Check,
    CheckResult,
    ConformanceReport,
    check_policy,
    examine,
    parametrize_with_checks,
)
from ellm_sgl.policies.testing.generate import (
    PROFILES,
    SHAPES,
    Size,
    make_state,
    random_state,
    requests,
)

__all__ = [
    "CHECKS",
    "PROFILES",
    "SHAPES",
    "BrokenRuleError",
    "Check",
    "CheckResult",
    "ConformanceReport",
    "Factory",
    "Size",
    "check_policy",
    "examine",
    "make_state",
    "parametrize_with_checks",
    "random_state",
    "requests",
]
