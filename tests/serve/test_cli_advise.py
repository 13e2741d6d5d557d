"""`ellm-sgl advise`: what it says of known models, and that it says it of what was asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ellm_sgl.eval.advice import BUDGET, PLOTTED, POINTS, RATIOS, Shapes, advise, over_memory
from ellm_sgl.eval.simulator import preset
from ellm_sgl.eval.simulator.restoring import RESTORATIONS, RestoringModel
from ellm_sgl.latency import RooflineLatencyModel, StepWork
from ellm_sgl.serve.cli import main

CHATS = Shapes(512, 256)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["advise", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    done = run("--device", "l4", "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_model_whose_steps_read_weights_gains_and_one_whose_steps_read_kv_does_not() -> None:
    l4 = {way.name: way for way in advise(preset("llama3-8b").limited(12_000, None), CHATS).ways}
    a100 = {way.name: way for way in advise(preset("llama2-13b"), CHATS).ways}
    assert l4["both"].gain > 1.2 and l4["both"].ratio > 0.2
    assert all(1 <= way.gain < 1.05 for way in a100.values())


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-13b", "llama2-70b"])
def test_a_step_that_restores_so_much_takes_so_much_longer(name: str) -> None:
    machine = preset(name)
    machine = machine.limited(min(machine.kv_tokens, 100_000), None)
    for way in advise(machine, CHATS).ways:
        model = RestoringModel(
            RooflineLatencyModel(machine.shape, machine.profile), machine, RESTORATIONS[way.name]
        )

        def seconds(share: float, model: RestoringModel = model) -> float:
            n, span = machine.kv_tokens / CHATS.mean_tokens, CHATS.mean_tokens * share
            work = StepWork(n, n * CHATS.mean_tokens, n * span, n * span**2)
            there = replace(work, swap_tokens=n * span, recompute_share=0.0)
            return float(model.step_seconds(there))

        assert seconds(way.share) <= 1.001 * (1 + BUDGET) * seconds(0)
        if way.share < 1:
            assert seconds(1.02 * way.share) > (1 + BUDGET) * seconds(0)
        assert way.gain >= 1 and way.ratio in RATIOS


def test_every_setting_has_a_reason() -> None:
    found = document("--kv-tokens", "5000", "--host-tokens", "3000", "--tpot-slo-ms", "20")
    settings = {each["flag"]: each for each in found["settings"]}
    assert all(each["reason"] for each in settings.values())
    assert settings["--ellm-policy"]["value"] == "fcfs"
    assert settings["--ellm-host-kv-tokens"]["value"] == "3000"
    assert settings["--ellm-tpot-slo-ms"]["value"] == "20"
    assert found["kv_tokens"] == 5000 and found["plot"] == []


def test_the_table_names_what_to_set() -> None:
    done = run("--device", "l4", "--kv-tokens", "5000")
    assert done.exit_code == 0, done.output
    assert "--ellm-host-kv-tokens" in done.stdout and "recompute" in done.stdout


def test_a_request_larger_than_memory_is_told_apart() -> None:
    found = document("--kv-tokens", "1000", "--prompt-tokens", "1800", "--output-tokens", "16")
    assert "larger than memory" in found["settings"][0]["reason"]
    refused = run("--device", "l4", "--kv-tokens", "100", "--prompt-tokens", "9000")
    assert refused.exit_code == 1 and "is larger than 100 KV tokens" in refused.stderr


def test_what_is_no_device_or_no_model_is_one_line(tmp_path: Path) -> None:
    for arguments, named in {
        ("--device", "l5"): "l5: cannot be read",
        ("--device", "l4", "--model-path", str(tmp_path)): "config.json: cannot be read",
        ("--device", "l4", "--plot", "a.txt"): "--plot a.txt",
    }.items():
        done = run(*arguments)
        assert done.exit_code == 1 and named in done.stderr


@pytest.mark.slow
def test_this_machine_is_measured_by_a_real_server(tmp_path: Path) -> None:
    """The default device: its profile is that of a CPU host, its memory what a server has taken;
    and the plot is a picture of the points in the document."""
    plot = tmp_path / "advice.png"
    done = run("--kv-tokens", "4000", "--prompt-tokens", "300", "--plot", str(plot), "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"].endswith(" on cpu") and found["kv_tokens"] == 4000
    assert all(way["gain"] >= 1 and 0 <= way["ratio"] < 1 for way in found["ways"])
    assert {point["mode"] for point in found["plot"]} == set(PLOTTED)
    assert len(found["plot"]) == len(POINTS) * len(PLOTTED)
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    said = "".join(done.stderr.split())  # lines are as long as a terminal
    assert "startingaserver" in said and f"written:{plot}" in said


def test_more_memory_is_never_much_worse_and_each_point_is_there() -> None:
    done: list[int] = []
    points = over_memory(preset("llama3-8b").limited(1_500, None), Shapes(100, 40), done.append)
    assert done == list(range(1, len(points) + 1))
    ours = [point.tokens_per_s for point in points if point.mode == "ellm"]
    assert len(ours) == len({p.kv_tokens for p in points}) == 6
    assert ours[-1] > 1.2 * ours[0] > 0
