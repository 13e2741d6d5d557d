"""Settings for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Helper modules beside the tests explain their failed assertions too.
pytest.register_assert_rewrite("tests.kv.page_table_model", "tests.forward.tiny")

# CI repeats the same examples on every run; elsewhere each run looks at new ones.
settings.register_profile(
    "ellm-sgl",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ellm-sgl")
