"""Runs SGLang's server: `python -m ellm_sgl.serve.launch [SGLang's arguments]`.

Importing this module prepares the process for SGLang; SGLang's worker processes, which Python
spawns by importing the main module again, are prepared by the same import.
"""

from __future__ import annotations

import os
import sys

from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()


def main(argv: list[str]) -> None:
    """Run the server until it is told to stop."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        server_args = prepare_server_args(argv)
    except (AssertionError, OSError, ValueError) as error:
        # SGLang checks its arguments with exceptions; a user wants the sentence, not the stack.
        sys.exit(f"ellm-sgl: error: {error}")
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
