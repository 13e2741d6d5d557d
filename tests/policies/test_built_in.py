"""Every policy of this package keeps the rules of the conformance kit."""

from __future__ import annotations

from functools import partial

import pytest

from ellm_sgl.policies import Fcfs, FixedRatio, Policy, Stock
from ellm_sgl.policies.baselines.whole_requests import WholeRequests
from ellm_sgl.policies.registry import installed, load
from ellm_sgl.policies.slo_priority import SloPriority
from ellm_sgl.policies.testing import Check, Factory, parametrize_with_checks

STATES = 25


@parametrize_with_checks(
    [
        Stock,
        partial(FixedRatio, ratio=0.5),
        Fcfs,
        partial(Fcfs, pause=False),
        partial(Fcfs, forecast=False, solver="slsqp"),
    ],
    states=STATES,
)
def test_it_keeps_the_rules(policy: Factory, check: Check) -> None:
    check(policy)


@parametrize_with_checks([partial(Fcfs, rotate=True)])
def test_rotation_keeps_the_rules(policy: Factory, check: Check) -> None:
    check(policy)


@pytest.mark.slow
@parametrize_with_checks([SloPriority])
def test_slo_priority_keeps_the_rules(policy: Factory, check: Check) -> None:
    check(policy)


@parametrize_with_checks(
    [WholeRequests],
    expected_failures={
        "targets-fit-the-device": "the kit charges M_o for what paused requests lack; but no "
        "step restores that, and who resumes is given units of its own",
    },
)
def test_whole_requests_keeps_the_rules(policy: Factory, check: Check) -> None:
    check(policy)


def test_none_is_left_out() -> None:
    ours = {
        load(name)
        for name, entry in installed().items()
        if entry.module.startswith("ellm_sgl.policies.")
    }
    tested: set[type[Policy]] = {Stock, FixedRatio, Fcfs, SloPriority}
    assert ours == tested
