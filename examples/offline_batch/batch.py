"""An offline batch larger than memory, over as many processes as are wanted, which share it.

`python batch.py --help` tells the arguments; README.md beside this file what happens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ellm_sgl

engine: Any = None
"""Of each worker process: its own."""


def start(settings: dict[str, Any]) -> None:
    """In a new worker process: load the model, once."""
    global engine
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    engine = ellm_sgl.Engine(**settings)


def answer(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to some requests, all of which the engine has at once: it decides how many run,
    and how much of each stays cached."""
    name = "input_ids" if "input_ids" in requests[0] else "prompt"
    found: list[dict[str, Any]] = engine.generate(
        **{name: [request[name] for request in requests]},
        sampling_params=[request.get("sampling_params", {}) for request in requests],
    )
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--input", type=Path, required=True, help='JSON lines: {"prompt": ...}')
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, in that order")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--memory-budget", help="NAME:SIZE of KV for all processes together")
    parser.add_argument("--device-kv-tokens", type=int, help="the most that one of them takes")
    parser.add_argument("--host-kv-tokens", type=int, default=0, help="of each of them")
    parser.add_argument("--at-once", type=int, default=64, help="requests that one gets at a time")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    requests = [json.loads(line) for line in args.input.read_text().splitlines()]
    if len({"input_ids" in request for request in requests}) > 1:
        raise SystemExit(f"{args.input}: give every request a prompt, or every one input_ids")
    parts = [requests[i : i + args.at_once] for i in range(0, len(requests), args.at_once)]
    settings = {
        "model_path": args.model_path,
        "dtype": args.dtype,
        "ellm_memory_budget": args.memory_budget,
        "ellm_device_kv_tokens": args.device_kv_tokens,
        "ellm_host_kv_tokens": args.host_kv_tokens,
    }
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(args.processes, spawn, start, (settings,)) as workers,
        args.output.open("w") as output,
    ):
        for found in itertools.chain.from_iterable(workers.map(answer, parts)):
            print(json.dumps(found), file=output, flush=True)


if __name__ == "__main__":
    main()
