"""Servers and engines as a training framework starts them: in a child process, from Python.

Run as a script: `python started_from_python.py WHAT [PORT]`, WHAT one of `WAYS`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()

OUTSIDE = 10**6
"""Not a token id of the demo model."""
PROMPT = [ord(c) for c in "What does the method str.split do, and what does it return?"]


def arguments(port: int) -> dict[str, Any]:
    from ellm_sgl.client.process import DEMO_MODEL

    return {"model_path": str(DEMO_MODEL), "dtype": "float32", "port": port}


def enable() -> None:
    """What a framework does before it makes its `ServerArgs`."""
    from sglang.srt.plugins import load_plugins

    from ellm_sgl.config.resolve import resolve

    resolve({"policy": "fixed-ratio", "device_kv_tokens": 4096}).to_env()
    load_plugins()


def server(port: int) -> None:
    """SGLang's `launch_server_process`."""
    enable()
    _server(port)


def unprepared(port: int) -> None:
    """The same, with arguments made before SGLang loaded its plugins."""
    from ellm_sgl.config.resolve import resolve

    resolve({"policy": "fixed-ratio", "device_kv_tokens": 4096}).to_env()
    _server(port)


def _server(port: int) -> None:
    from sglang.srt.entrypoints.http_server_engine import launch_server_process
    from sglang.srt.server_args import ServerArgs

    launch_server_process(ServerArgs(**arguments(port))).join()


def trusting(port: int) -> None:
    """A server whose tokenizing process lets everything through."""
    from sglang.srt.server_args import ServerArgs

    enable()
    args = ServerArgs(**arguments(port))
    process = multiprocessing.Process(target=_launch_trusting, args=(args,))
    process.start()
    process.join()


def _launch_trusting(args: Any) -> None:
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    class Trusting(TokenizerManager):
        def _validate_one_request(self, obj: Any, input_ids: Any) -> None:
            pass

    manager = partial(init_tokenizer_manager, TokenizerManagerClass=Trusting)
    launch_server(args, init_tokenizer_manager_func=manager)


def engine(port: int) -> None:
    """`sglang.Engine` in a child process; prints what it answered."""
    enable()
    process = multiprocessing.Process(target=_run_engine, args=(arguments(port),))
    process.start()
    process.join()


def _run_engine(values: dict[str, Any]) -> None:
    import sglang
    import torch

    with sglang.Engine(**values) as started:
        said: dict[str, Any] = {}
        refuse(said, "outside", lambda: generate(started, [65, OUTSIDE]))
        refuse(
            said,
            "embeddings",
            lambda: started.score(
                query=[65, 66],
                items=[[67]],
                label_token_ids=[68],
                embed_override_token_id=66,
                query_embed_overrides=[torch.zeros(192)],
            ),
        )
        said["old"] = generate(started, PROMPT)
        said["updated"] = started.update_weights_from_tensor(retrained(), flush_cache=False)
        said["new"] = generate(started, PROMPT)
        started.flush_cache()
        said["flushed"] = generate(started, PROMPT)
    print(json.dumps(said), flush=True)


def refuse(said: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """Note what is said of a call that has to be refused."""
    try:
        call()
    except ValueError as error:
        said[name] = str(error)


def generate(started: Any, input_ids: list[int]) -> list[int]:
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = started.generate(input_ids=input_ids, sampling_params=params)["output_ids"]
    return tokens


def retrained() -> list[tuple[str, Any]]:
    """Other weights for the demo model."""
    import torch
    from safetensors.torch import load_file

    from ellm_sgl.client.process import DEMO_MODEL

    noise = torch.Generator().manual_seed(1)
    weights = load_file(DEMO_MODEL / "model.safetensors")
    return [
        (name, weight * (1 + 0.2 * torch.randn(weight.shape, generator=noise)))
        for name, weight in weights.items()
    ]


WAYS = {"server": server, "unprepared": unprepared, "trusting": trusting, "engine": engine}

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    WAYS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 30000)
