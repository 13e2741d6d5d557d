"""Runs SGLang's server: `python -m ellm_sgl.serve.launch [SGLang's arguments]`.

Importing this module prepares the process for SGLang; SGLang's worker processes are copies of it
(`sglang/processes.py`), or Python spawns them by importing the main module again, which prepares
them as well.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()


def load() -> None:
    """Import what every server does, without deciding anything."""
    for module in ("launch_server", "srt.constrained.llguidance_backend",
                   "srt.entrypoints.http_server", "srt.managers.scheduler", "srt.models.registry",
                   "srt.plugins"):  # fmt: skip
        importlib.import_module(f"sglang.{module}")


def main(argv: list[str]) -> None:
    """Run the server until it is told to stop."""
    gc.disable()  # what is imported stays: to look through it again and again takes a second
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from ellm_sgl.sglang.processes import may_be_copied
    from ellm_sgl.sglang.versions import VERSIONS, adapter, installed

    try:
        server_args = prepare_server_args(argv)
        if installed() in VERSIONS:
            adapter().resolve(server_args)
    except (AssertionError, OSError, ValueError) as error:
        # SGLang checks its arguments with exceptions; a user wants the sentence, not the stack.
        sys.exit(f"ellm-sgl: error: {error}")
    may_be_copied()
    import sglang.srt.entrypoints.http_server  # noqa: F401  `run_server` would, behind `gc.enable`

    gc.freeze()
    gc.enable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
