"""docs/deploy.md and the Containerfile, neither of which is run here: their parts fit together, and
every flag in them is one that its program takes."""

from __future__ import annotations

import argparse
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ellm_sgl.serve import config_file
from ellm_sgl.serve.cli import main
from ellm_sgl.serve.cli_memory import memory
from ellm_sgl.sglang.platform.torchvision_ops import declare

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text()
CONTAINERFILE = (ROOT / "Containerfile").read_text()
OTHERS = {"--build-arg", "--no-deps", "--no-install-recommends", "--create-home", "--from", "--rm"}
"""Flags of docker, pip, apt-get and useradd, none of which is asked here."""


@cache
def server_parser() -> argparse.ArgumentParser:
    """As `ellm-sgl serve` and SGLang's own command have it."""
    declare()
    from sglang.srt.server_args import ServerArgs

    from ellm_sgl.sglang.server_args import add_flags

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--ellm-policy" not in flags_of(parser):  # where SGLang's plugins have been loaded, it is
        add_flags(None, parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for flag in parser._option_string_actions if flag.startswith("--")}


def router_flags() -> set[str]:
    declare()
    router_args = pytest.importorskip("sglang_router.router_args", exc_type=ImportError)
    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    return flags_of(parser)


def example_flags() -> set[str]:
    """Of the example on Ray, which is seldom installed: by its text."""
    text = (ROOT / "examples/offline_batch/on_ray.py").read_text()
    return set(re.findall(r'add_argument\("(--[a-z-]+)"', text))


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def block(kind: str, text: str) -> str:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]


@cache
def manifest() -> dict[str, Any]:
    """Its documents, by kind."""
    text = block("yaml", section("Container and Kubernetes"))
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def entry_point() -> list[str]:
    found: list[str] = json.loads(re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    return found


def container() -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest's pod, and the one container in it."""
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    return pod, found


def test_the_manifests_server_starts_with_arguments_that_exist() -> None:
    """The entry point's arguments, then the manifest's, as the container's command line is."""
    command, serve, *first = entry_point()
    assert (command, serve) == ("ellm-sgl", "serve")
    _, server = container()
    args = server_parser().parse_args([*first, *server["args"]])
    assert (args.host, args.enable_metrics) == ("0.0.0.0", True)
    assert args.ellm_host_kv_tokens == 200_000
    (port,) = server["ports"]
    assert port["containerPort"] == args.port
    assert f"\nEXPOSE {args.port}\n" in CONTAINERFILE
    (served,) = manifest()["Service"]["spec"]["ports"]
    assert (served["port"], served.get("targetPort", served["port"])) == (args.port, args.port)
    assert any(args.model_path.startswith(f"{m['mountPath']}/") for m in server["volumeMounts"])


def test_the_manifests_parts_name_each_other() -> None:
    deployment, service = (manifest()[kind] for kind in ("Deployment", "Service"))
    assert set(manifest()) == {"Deployment", "Service"}
    assert (deployment["apiVersion"], service["apiVersion"]) == ("apps/v1", "v1")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (label,) = (f"{key}={value}" for key, value in labels.items())
    pod, server = container()
    port = server["ports"][0]["containerPort"]
    found = f"`--service-discovery --selector {label} --service-discovery-port {port} "
    assert found in section("Container and Kubernetes")
    assert {m["name"] for m in server["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": server["ports"][0]["name"]}


def test_the_manifest_gives_what_the_page_says_a_server_needs() -> None:
    """Memory that is not taken away again, a thread to a core, time for the longest answer."""
    pod, server = container()
    limits = server["resources"]["limits"]
    assert limits == server["resources"]["requests"]
    assert {"name": "OMP_NUM_THREADS", "value": limits["cpu"]} in server["env"]
    assert all(isinstance(each["value"], str) for each in server["env"])
    wait = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait


def test_the_configuration_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "ellm-sgl.toml"
    path.write_text(block("toml", section("One server")))
    defaults, arguments = config_file.read(path, main)
    assert set(defaults) == {"serve"}
    more = [f"--{name.replace('_', '-')}={text}" for name, text in defaults["serve"].items()]
    args = server_parser().parse_args([*arguments, *more])
    assert args.enable_metrics and args.port == 30_000 and args.ellm_tpot_slo_ms == 50


def test_every_flag_is_one_of_a_program() -> None:
    ray = "An offline batch on Ray Data"
    assert flags_in(section(ray)) <= example_flags()
    rest = PAGE.replace(section(ray), "")
    discovery = "--service-discovery"
    routers = flags_in(section("A router")) | {
        discovery, "--selector", f"{discovery}-port", f"{discovery}-namespace",
    }  # fmt: skip
    ours = {flag for parameter in memory.params for flag in parameter.opts}
    served = flags_of(server_parser()) | ours
    assert flags_in(rest) - routers - {"--worker-urls"} - OTHERS <= served
    assert flags_in(CONTAINERFILE) - OTHERS <= flags_of(server_parser())
    assert routers <= router_flags()


def test_flags_that_ellm_refuses_are_named_as_refused() -> None:
    declare()
    from ellm_sgl.sglang.arguments import Kind, table

    refused = {
        argument.flag
        for argument in table().values()
        if argument.kind is Kind.REFUSED and not argument.allowed and argument.when is None
    }
    named = {flag: p for p in PAGE.split("\n\n") for flag in flags_in(p) & refused}
    assert "--nnodes" in named
    assert [flag for flag, paragraph in named.items() if "refused" not in paragraph] == []
