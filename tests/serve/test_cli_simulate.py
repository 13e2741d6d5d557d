"""`ellm-sgl simulate` and `ellm-sgl paper` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ellm_sgl.eval.paper.jobs import Done, distinct, run_all
from ellm_sgl.eval.paper.measured import VALIDATED, Gain, Measured, Validated, read_measured
from ellm_sgl.eval.paper.plan import plan
from ellm_sgl.serve.cli import main

SMALL = ["simulate", "--preset", "llama3-8b", "--requests", "12", "--scale-lengths", "0.1"]


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def report(*arguments: str):
    done = run(*SMALL, "--json", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_json_holds_one_report_per_mode_and_repeats():
    first, second = (report("--seed", "3", "--kv-tokens", "800") for _ in range(2))
    modes = [r["settings"]["mode"] for r in first["reports"]]
    assert modes == ["ellm", "recompute", "swap", "hcache"]
    for document in (first, second):
        for each in document["reports"]:
            del each["wall_s"]
    assert first == second


def test_the_baselines_alone_admit_as_asked():
    document = report("--admission", "vllm", "--baselines", "recompute,swap")
    assert [r["settings"]["admission"] for r in document["reports"]] == ["sglang", "vllm", "vllm"]


def test_the_table_names_every_mode():
    done = run(*SMALL, "--baselines", "recompute")
    assert done.exit_code == 0, done.output
    assert "ellm" in done.stdout and "recompute" in done.stdout and "hcache" not in done.stdout


def test_a_trace_and_a_configuration_are_read(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,100,5\n"
        "2023-11-16 18:15:47,50,5\n"
    )
    config = Path(__file__).parents[2] / "ellm_sgl" / "demo_model" / "config.json"
    done = run("simulate", "--json", "--trace", str(trace), "--config", str(config),
               "--device", "l4", "--baselines", "none")  # fmt: skip
    found = json.loads(done.stdout)
    assert found["requests"] == 2
    assert found["reports"][0]["summary"]["output_tokens"] == 10
    assert found["machine"]["shape"]["hidden"] == 192


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gpt"], "no preset 'gpt'"),
        (["--policy", "none"], "no policy 'none'"),
        (["--baselines", "magic"], "magic"),
        (["--trace", "/none.csv"], "cannot be read"),
        (["--lengths", "/none.csv"], "cannot be read"),
        (["--scale-rate", "-1"], "above 0"),
        (["--kv-tokens", "3"], "less than one block"),
        (["--kv-tokens", "2000000000"], "give fewer --kv-tokens"),
        (["--scale-lengths", "1000000"], "give a smaller factor"),
        (["--rate", "1e-300"], "give a larger factor"),
    ],
)
def test_bad_input_is_one_message(arguments, message):
    done = run(*SMALL, *arguments)
    assert done.exit_code != 0 and message in done.output
    assert "Traceback" not in done.output


def test_a_configuration_that_is_not_there_is_one_message():
    done = run("simulate", "--config", "/none.json")
    assert done.exit_code == 1 and "/none.json: cannot be read" in done.output


def test_the_papers_figures_all_have_jobs():
    figures = {job.figure for job in plan(1.0, "roofline")}
    assert figures == {"4", "5", "10", "13", "14", "table 2", "6.6"}


def test_a_simulation_that_two_figures_ask_for_runs_once():
    jobs = [job for job in plan(0.02, "roofline") if job.machine == "llama3-8b"]
    shared = [j for j in jobs if (j.figure, j.variant) == ("13", "ellm")
              or (j.figure, j.x) == ("6.6", 0.0)]  # fmt: skip
    other = next(j for j in jobs if j.variant == "swap only")
    ticked: list[Done] = []
    done = run_all([*shared, other], 1, ticked.append)
    assert all(d.job is job for d, job in zip(done, [*shared, other], strict=True))
    assert len(shared) == 2 and len(ticked) == len(distinct([*shared, other])) == 2
    assert done[0].sim is done[1].sim is not done[2].sim


CELL = {"factor": 3.0, "outputs": "known"}
RATIOS = {"cell": CELL, "best": "stock", "of_best": 1.5, "ttft_mean_of_best": 0.25}


def errors(count: int) -> dict[str, float]:
    return dict.fromkeys(VALIDATED, 1 / count)


def validation(**counts: int) -> dict[str, Any]:
    """As printed by `eval.validate`: models and how many configurations each had."""
    models = [
        {"model_path": name, "mape": errors(count), "configurations": [{}] * count}
        for name, count in counts.items()
    ]
    return {"mape": {}, "models": models}


MEASURED = {
    "validate": validation(a=1, b=4),
    "validate again": validation(b=12),
    "compare": {"ratios": [RATIOS], "scenario": {"model_path": "/models/some"}},
    "sweep": {"goodput": {"ellm": {"by_seed": [6, 9.0]}, "stock": {"by_seed": [3.0, 3]}}},
    "groups": {
        "server": [{"layer_group": 4, "ratio": r, "page_table_share": 0.125} for r in (0.0, 0.5)],
        "table": [{"layer_group": 4, "fragmentation": 0.0625}],
    },
    "fusion": [{"requests": 1, "prompt_tokens": 64, "separate_ms": 5.0, "ratio": 1.25}],
}


@pytest.fixture
def measured(tmp_path: Path) -> list[Path]:
    """A file of each command that measures."""
    for name, document in MEASURED.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return [tmp_path / f"{name}.json" for name in MEASURED]


def test_measured_figures_are_read(measured: list[Path]):
    load = "some, 3 x memory, output lengths known"
    assert read_measured(measured) == Measured(
        validated={"a": Validated(1, errors(1)), "b": Validated(12, errors(12))},
        gains=(Gain(load, "stock", slo_tokens_per_s=1.5, ttft=4.0),),
        goodputs=((6.0, 3.0), (9.0, 3.0)),
        fragmentation={4: 0.0625},
        table_shares={4: 0.125},
        fused={"1 x 64 tokens": 0.8},
    )


def test_errors_of_all_validated_configurations_count_alike(measured: list[Path]):
    found = read_measured(measured)
    assert found.configurations == 13 and found.error("ttft") == pytest.approx(2 / 13)
    assert Measured().error("ttft") is None


@pytest.mark.parametrize(
    "text",
    [
        '{"goodput": {"ellm": {"by_seed": [NaN]}, "stock": {"by_seed": [1]}}}',
        '[{"separate_ms": 1, "requests": 1, "prompt_tokens": 64, "ratio": Infinity}]',
        "[" * 200_000,
        "[]",
        "{}",
        "not JSON",
        '{"mape": {}, "models": [{"model_path": "m", "mape": {}, "configurations": []}]}',
        '[{"separate_ms": 1, "requests": 1, "prompt_tokens": 64, "ratio": 0}]',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    done = run("paper", "--measured", str(path), "--out", str(tmp_path / "r.html"))
    assert done.exit_code == 1 and f"{path}: not the JSON of ellm-sgl compare" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("latency_model", ["roofline", "paper"])
def test_the_report_needs_no_network_and_names_all_figures(
    tmp_path: Path, measured: list[Path], latency_model: str
):
    out = tmp_path / "r.html"
    files = [argument for path in measured for argument in ("--measured", str(path))]
    done = run("paper", "--scale", "0.004", "--workers", "1", "--out", str(out), *files,
               "--latency-model", latency_model, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["report"] == str(out)
    real = [r["measured"] for r in said["rows"] if "Real servers" in r["why"]]
    assert real == [1.5, 4.0, 2.5, 0.8]
    elastic = {r["paper"] for r in said["rows"] if r["where"].startswith("elastic memory, Fig. ")}
    assert {295.0, 140.0, 3.0, 2.32} <= elastic
    text = out.read_text()
    for link in ("<script", "<link", "<img", 'src="http', "@import", 'href="http'):
        assert link not in text
    for figure in ("Figs. 3(b) and 4", "Fig. 5(b)", "Fig. 7", "Figs. 10 and 12", "Fig. 11",
                   "Fig. 13", "Figs. 14 and 15", "Fig. 16", "Table 2", "§6.6", "§7",
                   *(f"Fig. {n} of the paper on elastic memory" for n in (9, 10, 11))):  # fmt: skip
        assert figure in text
    assert text.count("<svg") == text.count("<figcaption") == 25


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--trace", "azure.csv", "--rate", "2", "--seed", "1"), "--rate, --seed changes nothing"),
        (("--ranks", "4"), "--ranks changes nothing without --config"),
        (("--config", "config.json", "--preset", "llama3-8b"), "--preset changes nothing with"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(arguments: tuple[str, ...], told: str):
    done = run("simulate", *arguments)
    assert done.exit_code == 2 and told in " ".join(done.output.split())


def test_a_folder_that_is_not_there_is_told_before_anything_is_simulated(tmp_path: Path):
    done = run("paper", "--out", str(tmp_path / "no" / "report.html"))
    assert done.exit_code == 1 and "its folder does not exist" in done.output
