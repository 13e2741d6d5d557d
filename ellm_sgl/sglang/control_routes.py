"""What SGLang's routes for operators would end its schedulers with is refused before it gets there:
they are open to everybody where the server has no admin key."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ellm_sgl.config.ranges import shown
from ellm_sgl.sglang import cuda
from ellm_sgl.sglang.slo import json_object, read_body, refusal, replay, route

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_WEIGHTS = ("/update_weights_from_", "/begin_weight_update")
"""How the paths of routes begin that bring new weights."""
_RECORDS = frozenset(f"/{each}_expert_distribution_record" for each in ("start", "stop", "dump"))
LONGEST_SLEEP_S = 60.0
"""Before each step, while all requests wait."""


class ControlRoutes:
    """ASGI middleware.

    Args:
        records: SGLang can record which experts its models use.
        ranks: of a replica.
        keeps_weights: why new weights cannot be had by all replicas now; empty where they can.
    """

    def __init__(
        self,
        app: ASGIApp,
        records: bool,
        ranks: int,
        keeps_weights: Callable[[], Awaitable[str]],
    ) -> None:
        self._app, self._records, self._keeps_weights = app, records, keeps_weights
        self._checks = _CHECKS | {
            "/update_weights_from_tensor": functools.partial(_check_tensors, ranks=ranks)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route(scope) if scope["type"] == "http" else ""
        if path in _RECORDS and not self._records:
            problem = "nothing is recorded: start it with --expert-distribution-recorder-mode"
            await refusal(problem)(scope, receive, send)
        elif path.startswith(_WEIGHTS) and (problem := await self._keeps_weights()):
            await refusal(problem)(scope, receive, send)
        elif (check := self._checks.get(path)) is not None:
            body = await read_body(receive)
            try:
                check(json_object(body))  # of what is none SGLang says so
            except ValueError as error:
                await refusal(str(error))(scope, receive, send)
            else:
                await self._app(scope, replay(body, receive), send)
        else:
            await self._app(scope, receive, send)


def _check_profile(body: dict[str, Any]) -> None:
    """Profilers that are not there, and a folder that cannot be made, which is found out at the
    end."""
    activities = body.get("activities")
    for name in activities if isinstance(activities, list) else ():
        if (name == "CUDA_PROFILER" and not cuda.available()) or (
            name == "RPD" and importlib.util.find_spec("rpdTracerControl") is None
        ):
            raise ValueError(f"activities: {shown(name)} is not on this machine; give CPU")
    folder = body.get("output_dir")
    if isinstance(folder, str):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"output_dir: {shown(folder)} cannot be made ({error})") from None


def _check_sleep(body: dict[str, Any]) -> None:
    try:
        seconds = float(body.get("forward_sleep_time") or 0.0)
    except (TypeError, ValueError, OverflowError):
        return  # SGLang says so
    if not (math.isfinite(seconds) and seconds <= LONGEST_SLEEP_S):
        raise ValueError(
            f"forward_sleep_time: {shown(seconds)}; give seconds, {LONGEST_SLEEP_S:g} at most"
        )


def _check_tensors(body: dict[str, Any], ranks: int) -> None:
    given = body.get("serialized_named_tensors")
    if isinstance(given, list) and len(given) < ranks:
        raise ValueError(
            f"serialized_named_tensors: a list of {len(given)}; give one for each rank, {ranks}"
        )


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "/start_profile": _check_profile,
    "/slow_down": _check_sleep,
}
