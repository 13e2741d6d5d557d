"""The same on Ray Data: an engine in each actor, and Ray gives them batches of requests.

`python on_ray.py --help` tells the arguments; needs `pip install '.[ray]'` in the checkout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray


class Answers:
    """An engine, as a class that Ray Data makes once in each of its processes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import ellm_sgl

        self._engine = ellm_sgl.Engine(**settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """All requests of a batch at once; rows with their number, and the answer as JSON."""
        requests = [json.loads(text) for text in batch["request"]]
        name = "input_ids" if "input_ids" in requests[0] else "prompt"
        answers = self._engine.generate(
            **{name: [request[name] for request in requests]},
            sampling_params=[request.get("sampling_params", {}) for request in requests],
        )
        return {"id": batch["id"], "answer": [json.dumps(answer) for answer in answers]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--input", type=Path, required=True, help='JSON lines: {"prompt": ...}')
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, in that order")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--memory-budget", help="NAME:SIZE of KV for all actors of a machine")
    parser.add_argument("--device-kv-tokens", type=int, help="the most that one of them takes")
    parser.add_argument("--at-once", type=int, default=64, help="requests that one gets at a time")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    settings = {
        "model_path": args.model_path,
        "dtype": args.dtype,
        "ellm_memory_budget": args.memory_budget,
        "ellm_device_kv_tokens": args.device_kv_tokens,
    }
    lines = args.input.read_text().splitlines()
    if len({"input_ids" in json.loads(line) for line in lines}) > 1:
        raise SystemExit(f"{args.input}: give every request a prompt, or every one input_ids")
    numbered = [{"id": i, "request": line} for i, line in enumerate(lines)]
    # As many blocks as batches: a block goes to one actor as a whole.
    blocks = max(-(-len(numbered) // args.at_once), 1)
    rows = ray.data.from_items(numbered, override_num_blocks=blocks)
    found = rows.map_batches(
        Answers,
        fn_constructor_args=(settings,),
        batch_size=args.at_once,
        concurrency=args.actors,
        num_cpus=1,
    ).take_all()
    found.sort(key=lambda row: row["id"])
    args.output.write_text("".join(row["answer"] + "\n" for row in found))


if __name__ == "__main__":
    main()
