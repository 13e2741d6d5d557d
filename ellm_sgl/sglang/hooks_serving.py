"""The seams where arguments are read and requests come in: in the process that serves clients."""

from __future__ import annotations

from ellm_sgl.sglang.hook import Seam, When

_SRT = "sglang.srt"
_ARGS = f"{_SRT}.server_args.ServerArgs"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_CONTROL = f"{_SRT}.managers.tokenizer_control_mixin.TokenizerControlMixin"
_OURS = "ellm_sgl.sglang"

SERVING: tuple[Seam, ...] = (
    Seam(
        f"{_ARGS}.add_cli_args",
        "AFTER",
        f"{_OURS}.server_args:add_flags",
        When.ALWAYS,
        "the --ellm-* flags, also for plain sglang.launch_server",
    ),
    Seam(
        f"{_ARGS}.from_cli_args",
        "AROUND",
        f"{_OURS}.server_args:read_flags",
        When.ALWAYS,
        "turn the flags into settings before SGLang checks its own arguments",
    ),
    Seam(
        f"{_ARGS}.__post_init__",
        "AROUND",
        f"{_OURS}.server_args:check_arguments",
        When.ALWAYS,
        "page size = block size, our prefix cache; refuse what is not supported",
    ),
    Seam(
        f"{_ARGS}.check_server_args",
        "BEFORE",
        f"{_OURS}.server_args:check_adapted",
        When.ALWAYS,
        "arguments resolved before plugins were loaded went past the check above",
    ),
    Seam(
        f"{_TOKENIZER}.__init__",
        "AFTER",
        f"{_OURS}.http:serve_routes",
        When.ALWAYS,
        "GET /ellm/state; the app is imported by now, and importing it elsewhere takes 0.5 s",
    ),
    Seam(
        f"{_TOKENIZER}._validate_one_request",
        "BEFORE",
        f"{_OURS}.requests:check_request",
        When.ALWAYS,
        "refuse what eLLM cannot serve, and token ids that would end the server",
    ),
    *(
        Seam(
            f"{_CONTROL}.{name}_memory_occupation",
            "BEFORE",
            f"{_OURS}.requests:refuse_release",
            When.ALWAYS,
            "asked while requests run, it would end the scheduler",
        )
        for name in ("release", "resume")
    ),
)
