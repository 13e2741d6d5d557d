"""`ellm-sgl verify`: what it refuses, what it shows, and its one line about what failed."""

from __future__ import annotations

import dataclasses
import io

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from ellm_sgl.serve.cli import main
from ellm_sgl.serve.cli_verify import _show, _what_failed
from ellm_sgl.serve.verify.figures import Comparison, VerifyReport
from ellm_sgl.serve.verify.rounding import Spread

PROOF = Comparison(
    dtype="float32", setting="unfused, forced eviction", failure=None, outputs=18, differing=0,
    tokens=1728, agreeing=1728, max_logprob_difference=2.8e-6, forced=None, noise=None,
    recomputed_tokens=1_234_567, evicted_units=99_456, fetched_units=1_234_567,
    projected_units=0, stored_tokens=0, retractions=0, pauses=1234, aborted=6, resized=180,
    at_floor=20, overtaken=1, integrity="ok",
)  # fmt: skip
BY_ROUNDING = dataclasses.replace(
    PROOF,
    dtype="bfloat16",
    agreeing=1725,
    forced=Spread(288, 0.0012, 0.022),
    noise=Spread(288, 0.0011, 0.021),
)  # fmt: skip


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--output-tokens", "0"),
        ("--output-tokens", "-3"),
        ("--max-prompt-tokens", "0"),
        ("--max-prompt-tokens", "-1"),
        ("--ellm-block-tokens", "0"),
        ("--ellm-layer-group", "0"),
        ("--dtype", "int8"),
        ("--dtype", "auto"),
        ("--ellm-mode", "stock"),
        ("--resizes", "-1"),
        ("--resizes", "nan"),
    ],
)
def test_numbers_and_names_that_make_no_sense_are_refused(option: str, value: str) -> None:
    done = verify(option, value)
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': " in done.stderr and value in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-prompt-tokens", "1", "--output-tokens", "9"), "at most 10 tokens are too short"),
        (("--max-prompt-tokens", "333", "--ellm-block-tokens", "64"), "must have 512 together"),
        (("--max-prompt-tokens", "200", "--output-tokens", "4", "--dtype", "bfloat16"),
         "36 tokens of output do not tell how large rounding is"),
        (("--resizes", "9", "--ellm-mode", "swap"), "--resizes 9: only of eLLM, not of mode swap"),
    ],
    ids=["no block", "large blocks", "few tokens", "a baseline resized"],
)  # fmt: skip
def test_lengths_with_which_nothing_can_be_shown_are_refused(
    arguments: tuple[str, ...], words: str
) -> None:
    done = verify(*arguments)
    assert done.exit_code == 1
    assert words in done.stderr


def report(*comparisons: Comparison) -> VerifyReport:
    return VerifyReport("model", 18, 16, comparisons, left_out=("chats, two ranks: one core",))


def test_a_table_fits_80_columns() -> None:
    screen = Console(file=io.StringIO(), width=80)
    baseline = dataclasses.replace(PROOF, dtype="float16", setting="recompute", retractions=123)
    _show(report(PROOF, BY_ROUNDING, baseline), screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("unfused, forced eviction", "1728/1728", "2.8e-06", "1.2e-03", "2.2e-02",
                 "1,234k", "99,456", "1,234", "123", "99.8%", "ok",
                 "stock, two batch sizes", "1.1e-03 2.1e-02",
                 "resizes: 180 applied, 20 at the floor, 1 overtaken",
                 "left out: chats, two ranks: one core", "model: passed"):  # fmt: skip
        assert text in shown
    assert "…" not in shown


def test_what_failed_is_shown_and_told_in_one_line() -> None:
    failed = dataclasses.replace(PROOF, failure="3 of 18 outputs differ")
    unexercised = dataclasses.replace(PROOF, failure="exercised nothing: no request was paused")
    found = report(PROOF, failed, unexercised)
    screen = Console(file=io.StringIO(), width=80)
    _show(found, screen)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("FAIL") == 2 and "model: failed" in shown
    line = _what_failed(found)
    assert line == (
        "verify failed: float32, unfused, forced eviction: 3 of 18 outputs differ (and 1 more)"
    )
