"""The table of SGLang's arguments: it has every one, and what it says can be checked is."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.sglang.arguments import Argument, Kind, refusal, table
from ellm_sgl.sglang.arguments_page import page
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.versions import adapter

declare()
ROOT = Path(__file__).parents[2]
OF_KIND = {kind: [row for row in table().values() if row.kind is kind] for kind in Kind}
IN_PART: dict[str, dict[str, Any]] = {
    "schedule_policy": {"schedule_policy": "random"},
    "radix_eviction_policy": {"radix_eviction_policy": "tlru"},
    "enable_priority_scheduling": {"enable_priority_scheduling": True},
    "device": {"device": "xpu"},
}
"""Arguments that are refused with some values only, and those values."""


OVERLAP = "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"


def given(**values: Any) -> Any:
    """All arguments at their defaults, but these."""
    return SimpleNamespace(**adapter().defaults() | {"model_path": "model"} | values)


def other(field: str) -> Any:
    """A value that is neither the default nor one that any row allows."""
    default = getattr(given(), field)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else "something"


def test_every_argument_of_sglang_has_a_row_and_every_row_an_argument() -> None:
    assert set(table()) == set(adapter().defaults())


@pytest.mark.parametrize("row", table().values(), ids=lambda row: row.field)
def test_a_row_says_why(row: Argument) -> None:
    assert row.why or row.kind is Kind.WORKS
    assert "\n" not in row.why and not row.why.endswith((".", ";"))


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


SHOWN = [*OF_KIND[Kind.WORKS], *(row for row in OF_KIND[Kind.REFUSED] if row.tests)]


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.field)
def test_what_works_is_shown_by_a_test_that_exists(row: Argument) -> None:
    path, _, name = row.tests.partition("::")
    assert name.startswith("test_") and name in functions_of(ROOT / path)


def test_defaults_are_not_refused() -> None:
    assert refusal(given(), resolved=False) is None


@pytest.mark.parametrize("row", OF_KIND[Kind.REFUSED], ids=lambda row: row.field)
def test_what_is_refused_is_named_with_a_remedy(row: Argument) -> None:
    values: Any = IN_PART.get(row.field, {row.field: other(row.field)})
    said = refusal(given(**values), resolved=False)
    assert said is not None
    assert said.startswith(row.flag) and said.endswith(f"; {row.remedy}")
    if row.field not in IN_PART:
        for value in row.allowed:
            assert refusal(given(**{row.field: value}), resolved=False) is None


def test_priority_without_preemption_is_not_refused() -> None:
    values = {"enable_priority_scheduling": True, "disable_priority_preemption": True}
    assert refusal(given(**values), resolved=False) is None


def test_what_sglang_sets_itself_is_refused_only_as_given() -> None:
    args = given(cuda_graph_config="resolved", moe_runner_backend="deep_gemm")
    assert refusal(args, resolved=True) is None
    assert "--moe-runner-backend deep_gemm" in str(
        refusal(given(moe_runner_backend="deep_gemm"), resolved=False)
    )


def test_a_server_in_rust_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ellm_sgl.config import EllmConfig
    from ellm_sgl.sglang.server_args import check_arguments

    monkeypatch.setattr(EllmConfig, "from_env", lambda: EllmConfig(policy="fcfs"))
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(SystemExit):
        check_arguments(pytest.fail, given())
    assert "SGLANG_RUST_SERVER=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "more", "alike", "refused"),
    [
        ("SGLANG_REQ_WAITING_TIMEOUT", "2.5", {"tp_size": 2}, False, True),
        ("SGLANG_REQ_RUNNING_TIMEOUT", "60", {"tp_size": 2}, False, True),
        ("SGLANG_REQ_RUNNING_TIMEOUT", "60", {"tp_size": 2}, True, False),
        ("SGLANG_REQ_RUNNING_TIMEOUT", "60", {}, False, False),
        (OVERLAP, "1", {"enable_mixed_chunk": True}, True, True),
        (OVERLAP, "1", {}, True, False),
    ],
)  # fmt: skip
def test_variables_of_sglang_that_steps_cannot_follow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    more: dict[str, object],
    alike: bool,
    refused: bool,
) -> None:
    from ellm_sgl.sglang.server_args import _refuse_unsupported
    from ellm_sgl.sglang.versions import adapter

    monkeypatch.setattr(type(adapter()), "times_out_alike", alike)
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) if refused else nullcontext():
        _refuse_unsupported(given(**more), resolved=False)
    assert (f"{name}={value} with --" in capsys.readouterr().err) == refused


def test_the_page_is_what_the_table_says() -> None:
    path = ROOT / "docs" / "sglang-arguments.md"
    assert path.read_text() == page(), "python -m ellm_sgl.sglang.arguments_page > the page"
