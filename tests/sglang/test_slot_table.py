"""SGLang's table of every request's slots, of long contexts: how many requests it has rows for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_sgl.sglang.memory import _SLOT_TABLE_BYTES, _bound_requests
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()
SLOT = 4
"""Bytes."""


def bounded(chosen: int, context: int, given: int | None = None) -> int:
    """Requests that run at most: SGLang has chosen some, the user has given some, or none."""
    config: Any = SimpleNamespace(max_running_requests=chosen)
    configurator: Any = SimpleNamespace(
        model_config=SimpleNamespace(context_len=context),
        server_args=SimpleNamespace(max_running_requests=given),
    )
    _bound_requests(config, configurator)
    found: int = config.max_running_requests
    return found


def test_of_a_million_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert bounded(2048, 1 << 20) == 256
    assert "256 requests run at most, not 2048: for a context of 1048576 tokens" in caplog.text
    assert "would take 8.6 GB (--max-running-requests says otherwise)" in caplog.text


def test_shorter_contexts_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert bounded(2048, 131_072) == 2048
        assert bounded(4096, 8192) == 4096
    assert caplog.text == ""


@given(st.integers(1, 1 << 13), st.integers(1, 1 << 31))
def test_as_many_as_the_table_has_room_for(chosen: int, context: int) -> None:
    found = bounded(chosen, context)
    assert 1 <= found <= chosen
    assert found == 1 or found * SLOT * context <= _SLOT_TABLE_BYTES
    assert found == chosen or (found + 1) * SLOT * context > _SLOT_TABLE_BYTES


@given(st.integers(1, 1 << 13), st.integers(1, 1 << 31))
def test_what_was_given_holds(given: int, context: int) -> None:
    assert bounded(given, context, given) == given
