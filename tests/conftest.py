"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ellm_sgl.client.preload import preloaded
from ellm_sgl.client.process import environment_with
from tests.servers import STRICT

# OpenMP's threads spin while they wait: beside a busy core that took tests eight times as long.
# libgomp reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A server's start measures for half a second how memory is read best, which changes no result. What
# measures it is tested in tests/kernels.
os.environ.setdefault("ELLM_SGL_CPU_PREFETCH", "t0:1")

# And for three seconds how long steps take, which no answer depends on (tests/e2e/test_calibrate.py
# leaves a server its three).
os.environ.setdefault("ELLM_SGL_CALIBRATION_S", "0.3")

# Helper modules beside the tests explain their failed assertions too.
pytest.register_assert_rewrite("tests.memory.page_table_model", "tests.step.tiny")

# CI repeats the same examples on every run; elsewhere each run looks at new ones.
settings.register_profile(
    "ellm-sgl",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ellm-sgl")

# A shell without job control starts what it runs in the background with Ctrl-C ignored, and so is
# everything below it: tests send it to themselves and to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def servers_are_copies() -> Iterator[None]:
    """What all servers import is imported once; one whose environment is another starts as users
    start it, and so does what is started by a shell's command."""
    with preloaded(environment_with(STRICT)):
        yield


LONG = {f"test_{name}.py" for name in ("verify", "regret", "learnt_lengths", "mixed_load",
                                        "soak", "compare")}  # fmt: skip
"""Files of few tests that take a minute or more each: last, they would leave one of two workers
waiting for the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others as they come."""
    items.sort(key=lambda item: item.path.name not in LONG)
