"""`ellm-sgl bench`: its scenarios, its options and what it says when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ellm_sgl.eval.bench import report, scenarios
from ellm_sgl.eval.bench.result import Result as Measured
from ellm_sgl.eval.bench.result import Sample
from ellm_sgl.eval.bench.scenarios import SCENARIOS, overhead
from ellm_sgl.eval.paper.measured import HostMemory, read_measured
from ellm_sgl.serve import cli_bench
from ellm_sgl.serve.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_every_module_is_a_scenario_with_a_line_in_the_list() -> None:
    folder = Path(scenarios.__file__).parent
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert modules == {name.replace("-", "_") for name in SCENARIOS}
    listed = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(SCENARIOS)
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in listed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_says_what_it_compares(name: str) -> None:
    """Whatever it is held against, and its reference, are settings of its own."""
    made = SCENARIOS[name]()
    names = {s.name for s in made.settings()}
    servers = made.starters()
    assert {s.server for s in made.settings()} <= {*servers}
    assert {*made.against, *made.against.values()} <= names
    assert made.reference is None or made.reference in names


def made_up(name: str, **extra: object) -> Measured:
    """A stand-in for what was measured: every figure is 1."""
    made = SCENARIOS[name]()
    figures = {figure: 1.0 for c in made.columns for figure in (c.figure, *c.more)}
    return Measured(
        tuple(
            Sample(cell, setting.name, number, figures)
            for cell in made.cells()
            for setting in made.settings()
            for number in range(2)
        ),
        extra,
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_column_can_be_written(name: str) -> None:
    made, result = SCENARIOS[name](), made_up(name)
    for cell in made.cells():
        rows = list(made.rows(result, cell))
        assert [row[0] for row in rows] == [s.name for s in made.settings()]
        assert {len(row) for row in rows} == {1 + len(made.columns)}


def test_a_wide_table_is_not_cut_off_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_bench, "run", lambda *_: made_up("rotation", integrity="ok"))
    done = run("rotation")
    assert done.exit_code == 0 and "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) > 80
    assert "page table: ok" in done.stdout


def test_the_paper_command_understands_the_documents(tmp_path: Path) -> None:
    found = {
        "fusion": made_up("fusion"),
        "load-sweep": made_up("load-sweep", ellm=(6.0, 9.0, 3.0), stock=(3.0, 3.0, 3.0)),
        "layer-groups": made_up("layer-groups"),
        "rotation": made_up("rotation", integrity="ok"),
    }
    for name, result in found.items():
        document = report.document(name, SCENARIOS[name](), result)
        (tmp_path / name).write_text(json.dumps(report.provenance() | document))
    read = read_measured([tmp_path / name for name in found])
    assert read.fused["4 x 64 tokens"] == 1.0 and len(read.fused) == 6
    assert read.goodputs == ((6.0, 3.0), (9.0, 3.0), (3.0, 3.0))
    assert read.table_shares == dict.fromkeys((1, 2, 4, 8), 1.0)
    assert read.host_memory == HostMemory(1.0, 1.0, 1.0)
    assert all(0 < share < 0.0128 for share in read.fragmentation.values())


@pytest.mark.parametrize("name", ["busy-core", "busy_core"])
def test_a_module_is_understood_as_well(name: str) -> None:
    assert "busy process" in run(name, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["overhead", "--rounds", "0"], "--rounds"),
        (["load-sweep", "--rounds", "1"], "--rounds"),
        (["overhead", "--server", "vllm"], "--server"),
        (["overhead", "--plot", "picture.doc"], "--plot picture.doc: give a name"),
        (["overhead", "--plot", "no/where/picture.png"], "there is no folder no/where"),
        (["compare", "--servers", "vllm"], "--servers vllm: give some of ellm"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], problem: str) -> None:
    done = run(*arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert done.exit_code != 0 and done.stdout == ""
    assert len(errors) == 1 and problem in errors[0]


@pytest.mark.parametrize(
    ("arguments", "wanted_by"),
    [(["bench", "overhead", "--plot", "x.png"], "--plot"), (["paper"], "ellm-sgl paper")],
)
def test_without_matplotlib_the_remedy_is_told(
    arguments: list[str], wanted_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        f"Error: {wanted_by} needs matplotlib: pip install 'ellm-sgl[plot]'"
    ]


def test_one_core_is_too_few_for_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert "busy-core needs two cores" in run("busy-core").output


def test_only_some_servers_are_compared_with_what_is_there() -> None:
    made = overhead.Overhead(only=("r = 0", "stock"))
    assert [s.name for s in made.settings()] == ["stock", "r = 0"]


def test_the_table_alone_needs_no_server_and_says_where_it_comes_from() -> None:
    done = run("layer-groups", "--rounds", "0", "--json")
    said = json.loads(done.stdout)
    assert (said["bench"], said["options"]) == ("layer-groups", {"rounds": 0})
    assert {"command", "date", "machine", "versions"} <= said.keys()
    assert said["machine"]["cores"] > 0 and "sglang" in said["versions"]
    assert said["server"] == [] and [t["layer_group"] for t in said["table"]] == [1, 2, 4, 8]
    assert said["tables"][0]["title"] == "The page table alone"
