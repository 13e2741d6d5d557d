"""Servers and engines as a training framework starts them: in a child process, from Python.

Run as a script: `python started_from_python.py WHAT [PORT]`, WHAT one of `WAYS`. It prepares
nothing: importing `ellm_sgl` does.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import ellm_sgl

OUTSIDE = 10**6
"""Not a token id of the demo model."""
PROMPT = [ord(c) for c in "What does the method str.split do, and what does it return?"]


def arguments(port: int) -> dict[str, Any]:
    from ellm_sgl.client.process import DEMO_MODEL

    return {"model_path": str(DEMO_MODEL), "dtype": "float32", "port": port}


def engine_arguments(port: int) -> dict[str, Any]:
    """An engine listens on no port but that of torch.distributed, which SGLang would take from the
    ephemeral range seconds before it listens."""
    return arguments(port) | {"nccl_port": port}


SETTINGS: dict[str, Any] = {"policy": "fixed-ratio", "device_kv_tokens": 4096}
FULL, HALF = 32_000, 1_000
"""Tokens of KV: more than the prompts below need, and less than half of it."""


def server(port: int) -> None:
    """`sglang.Runtime`."""
    import sglang

    with ellm_sgl.enabled(**SETTINGS):
        runtime = sglang.Runtime(**arguments(port))
    print(runtime.url, flush=True)
    signal.pause()


def unprepared(port: int) -> None:
    """SGLang's `launch_server_process`, with arguments made before eLLM was on."""
    from sglang.srt.entrypoints.http_server_engine import launch_server_process
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**arguments(port))
    with ellm_sgl.enabled(**SETTINGS):
        launch_server_process(args).join()


def trusting(port: int) -> None:
    """A server whose tokenizing process lets everything through."""
    from sglang.srt.server_args import ServerArgs

    with ellm_sgl.enabled(**SETTINGS):
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
    """Engines in child processes, one after the other; prints what they answered."""
    said: dict[str, Any] = {}
    for way in (_stock_and_elastic, _enabled_engine):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            said |= process.submit(way, engine_arguments(port)).result()
    print(json.dumps(said), flush=True)


def _stock_and_elastic(values: dict[str, Any]) -> dict[str, Any]:
    """A stock engine, then one of ours in the same process."""
    import sglang

    said: dict[str, Any] = {}
    bad: dict[str, dict[str, Any]] = {
        "unknown": {"ellm_polcy": "fcfs"},
        "bad": {"ellm_overlap": "perhaps"},
        "unsupported": {"ellm_policy": "fcfs", "enable_memory_saver": True},
    }
    for name, setting in bad.items():
        refuse(said, name, partial(ellm_sgl.Engine, **values, **setting))
    with sglang.Engine(**values, max_total_tokens=FULL) as stock:
        said["stock"] = [generate(stock, prompt) for prompt in (PROMPT, PROMPT[::-1])]
        said["stock batch"] = batch(stock)
    with ellm_sgl.Engine(
        **values, ellm_policy="fcfs", ellm_device_kv_tokens=HALF, ellm_max_device_kv_tokens=FULL
    ) as ours:
        said["ours"] = [generate(ours, prompt) for prompt in (PROMPT, PROMPT[::-1])]
        said["ours batch"] = batch(ours)
        said["state"] = ours.ellm_state(integrity=True)
        said["steps"] = len(ours.ellm_steps())
        ours.set_policy("fixed-ratio", ratio=0.25)
        refuse(said, "no policy", lambda: ours.set_policy("none"))
        said["ratio batch"] = batch(ours)
        said["grown"] = ours.resize(FULL)
        refuse(said, "too large", lambda: ours.resize(10 * FULL))
        said["later"] = ours.ellm_state(integrity=True)
    return said


def restoring(port: int) -> None:
    """An engine of which half of what is cached is restored in every step; prints its answer."""
    settings = {f"ellm_{name}": value for name, value in SETTINGS.items()}
    with ellm_sgl.Engine(**engine_arguments(port), **settings, ellm_ratio=0.5) as ours:
        said = {"output_ids": generate(ours, PROMPT), "state": ours.ellm_state(integrity=True)}
    print(json.dumps(said), flush=True)


def killed(port: int) -> None:
    """An engine at work, until somebody kills this process."""
    settings = {f"ellm_{name}": value for name, value in SETTINGS.items()}
    with ellm_sgl.Engine(**engine_arguments(port), **settings) as ours:
        print("works", flush=True)
        ours.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 8000})


def batch(started: Any) -> list[list[int]]:
    """Sixteen requests at once: 3,000 tokens."""
    inputs = [PROMPT[i:] + PROMPT * 2 for i in range(16)]
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    return [a["output_ids"] for a in started.generate(input_ids=inputs, sampling_params=params)]


def _enabled_engine(values: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own engine, made in the block and used after it."""
    import sglang
    import torch

    with ellm_sgl.enabled(**SETTINGS):
        started = sglang.Engine(**values)
    with started:
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
        said["policy"] = started.get_server_info()["internal_states"][0]["ellm"]["policy"]["name"]
    return said


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


WAYS = {
    "server": server,
    "unprepared": unprepared,
    "trusting": trusting,
    "engine": engine,
    "restoring": restoring,
    "killed": killed,
}

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    WAYS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 30000)
