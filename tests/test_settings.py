"""Settings of one server: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ellm_sgl.config.resolve import resolve


def given(path: Path, **more: Any) -> dict[str, Any]:
    return {"host_path": str(path), "host_kv_tokens": 64, **more}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, False),
        ({"host_keeps": "hidden"}, True),
        ({"host_keeps": "3"}, True),
        ({"host_keeps": "0"}, False),
        ({"host_keeps": "3", "hidden_on": "device"}, False),
    ],
)
def test_hidden_states_have_a_file_where_they_are_on_the_host(
    tmp_path: Path, more: dict[str, Any], expected: bool
) -> None:
    assert resolve(given(tmp_path / "tier", **more)).hidden_in_file is expected
    assert not resolve({"host_kv_tokens": 64, **more}).hidden_in_file
