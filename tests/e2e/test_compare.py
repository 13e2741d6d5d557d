"""`ellm-sgl compare`, with real servers: every run, in every round, has the same outputs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ellm_sgl.serve.cli import main


@pytest.mark.slow
def test_compare_reports_every_run() -> None:
    """In this process: its servers are copies of what all tests' are. They measure as long as
    others do: it is not to depend on a moment of this machine whether the policy finds that
    restoring pays."""
    command = ["compare", "--json", "--rounds", "2", "--requests", "8", "--factor", "3",
               "--outputs", "known", "--servers", "ellm,stock"]  # fmt: skip
    runner = CliRunner(env={"OMP_NUM_THREADS": "1", "ELLM_SGL_CALIBRATION_S": "3"})
    done = runner.invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert [(run["round"], run["server"]) for run in report["runs"]] == [
        (0, "ample"), (0, "ellm"), (0, "stock"), (1, "stock"), (1, "ellm"), (1, "ample"),
    ]  # fmt: skip
    assert all(run["same_output"] == 1 for run in report["runs"])
    assert all(run["summary"]["tokens_per_s"] > 0 for run in report["runs"])
    assert done.stderr.count("starting ellm") == 2, "each round has servers of its own"
    restored = [run["fetched_units"] for run in report["runs"] if run["server"] == "ellm"]
    # Three times what memory holds; but the policy may hold back in a round that is slow.
    assert sum(restored) > 0
