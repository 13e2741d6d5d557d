"""What this policy promises, and the rules that every policy keeps."""

from __future__ import annotations

import pytest
from shortest_first import ShortestFirst

from ellm_sgl.policies.testing import (
    Check,
    Factory,
    make_state,
    parametrize_with_checks,
    requests,
)


@parametrize_with_checks([ShortestFirst])
def test_it_keeps_the_rules(policy: Factory, check: Check) -> None:
    check(policy)


def test_the_shortest_is_admitted_first() -> None:
    state = make_state(requests([]), requests([300, 100, 200]), device_tokens=4096)
    assert ShortestFirst().batch(state).admit == (1, 2, 0)


def test_waiting_makes_a_request_shorter() -> None:
    waiting = requests([300, 100], waited_s=[11.0, 0.0])
    state = make_state(requests([]), waiting, device_tokens=4096)
    assert ShortestFirst(tokens_per_second=20.0).batch(state).admit == (0, 1)


def test_long_requests_must_not_wait_for_ever() -> None:
    with pytest.raises(ValueError, match="tokens_per_second is 0"):
        ShortestFirst(tokens_per_second=0)
