"""Requests for operators' routes that would end the schedulers, and all others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ellm_sgl.sglang.control_routes import ControlRoutes

RECORDS = ["/start_expert_distribution_record", "/dump_expert_distribution_record"]


def answered(
    path: str, body: bytes = b"", records: bool = False, ranks: int = 1, held: str = ""
) -> httpx.Response:
    """What a client gets where SGLang answers with what it was sent."""

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    inner: Any = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])

    async def keeps_weights() -> str:
        return held

    app = ControlRoutes(inner, records, ranks, keeps_weights)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request("POST" if body else "GET", path, content=body)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", RECORDS)
def test_nothing_is_recorded_where_no_recorder_was_asked_for(path: str) -> None:
    refused = answered(path)
    assert refused.status_code == 400
    assert "--expert-distribution-recorder-mode" in refused.json()["message"]
    assert answered(path, records=True).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/start_profile", "activities", ["CPU", "CUDA_PROFILER"]),
        ("/start_profile", "activities", ["RPD"]),
        ("/start_profile", "output_dir", "/proc/none"),
        ("/start_profile", "output_dir", "a\0b"),
        ("/slow_down", "forward_sleep_time", float("nan")),
        ("/slow_down", "forward_sleep_time", 1e300),
        ("/slow_down", "forward_sleep_time", "inf"),
        ("/update_weights_from_tensor", "serialized_named_tensors", []),
    ],
)
def test_what_would_end_a_scheduler_is_refused_by_name(path: str, field: str, value: Any) -> None:
    refused = answered(path, json.dumps({field: value}).encode())
    assert refused.status_code == 400
    assert refused.json()["message"].startswith(f"{field}: ")


def test_everything_else_is_sglangs(tmp_path: Path) -> None:
    profile = {"activities": ["CPU"], "output_dir": str(tmp_path / "new"), "num_steps": 3}
    bodies: list[Any] = [
        ("/start_profile", profile), ("/start_profile", {"output_dir": 5, "activities": "CPU"}),
        ("/slow_down", {"forward_sleep_time": 0.5}), ("/slow_down", {"forward_sleep_time": None}),
        ("/slow_down", {"forward_sleep_time": "x"}), ("/slow_down", [1]),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}), ("/generate", 3),
    ]  # fmt: skip
    for path, sent in bodies:
        body = json.dumps(sent).encode()
        answer = answered(path, body)
        assert (answer.status_code, answer.content) == (200, body)
    odd = b"[" * 10**5
    assert answered("/slow_down", odd).content == odd


def test_tensors_are_needed_for_each_rank() -> None:
    body = json.dumps({"serialized_named_tensors": ["x", "y"]}).encode()
    refused = answered("/update_weights_from_tensor", body, ranks=3)
    assert refused.status_code == 400
    assert "a list of 2; give one for each rank, 3" in refused.json()["message"]
    assert answered("/update_weights_from_tensor", body, ranks=2).content == body


@pytest.mark.parametrize("path", ["update_weights_from_disk", "begin_weight_update"])
def test_new_weights_are_refused_for_all_replicas_where_one_cannot_have_them(path: str) -> None:
    refused = answered(f"/{path}", b"{}", held="replica 0: 2")
    assert (refused.status_code, refused.json()["message"]) == (400, "replica 0: 2")
    assert answered(f"/{path}", b"{}").status_code == 200
    assert answered("/generate", b"{}", held="replica 0: 2").status_code == 200
