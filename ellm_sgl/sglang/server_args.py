"""Flags, and what of SGLang's arguments goes together with eLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ellm_sgl.config import ELLM, OFF, ConfigError, EllmConfig
from ellm_sgl.config.flags import FLAGS, Flag
from ellm_sgl.config.ranges import shown
from ellm_sgl.config.resolve import resolve
from ellm_sgl.sglang import cuda, enabling, unknown_version
from ellm_sgl.sglang.arguments import refusal, table
from ellm_sgl.sglang.platform_entry import ATTENTION_BACKEND, activate
from ellm_sgl.sglang.versions import VERSIONS, adapter, installed, turn_off
from ellm_sgl.sglang.versions.signatures import differences

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PREFIX_CACHE = "ellm"
ANY_PORT = 0
"""Whichever is free when it is listened on."""

ARCHITECTURES = frozenset({
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
})  # fmt: skip
"""Models proved exact by `ellm-sgl verify` in the test suite."""


def add_flags(_: None, parser: argparse.ArgumentParser) -> None:
    """Hook after `ServerArgs.add_cli_args`."""
    group = parser.add_argument_group("eLLM (partial KV caching; enabled by --ellm-policy)")
    group.add_argument(
        "--ellm-policy",
        metavar="NAME",
        help=f"Enable eLLM with this policy (`ellm-sgl policies list`). '{OFF}' is stock SGLang.",
    )
    for flag in FLAGS:
        text = flag.help.replace("%", "%%")
        group.add_argument(flag.option, type=_parser(flag), metavar=flag.metavar, help=text)


def read_flags(original: Callable[..., ServerArgs], cls: type, args: Any) -> ServerArgs:
    """Hook around `ServerArgs.from_cli_args`: settings first, so that the check sees them."""
    given = {
        name.removeprefix("ellm_"): value
        for name, value in vars(args).items()
        if name.startswith("ellm_") and value is not None
    }
    mode = given.get("mode", ELLM)
    if mode != ELLM:
        given.setdefault("policy", mode)
    policy = given.get("policy")
    try:
        if given and policy is None:
            flag = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--ellm-{flag} needs --ellm-policy, which enables eLLM")
        if given and policy != OFF and (sglang := installed()) not in VERSIONS:
            unknown_version.off_by_flags(sglang)
        elif given and policy != OFF:
            resolve(given).to_env()
        elif policy == OFF:  # also where the process that started this one has it on
            EllmConfig.clear_env()
    except ConfigError as error:
        _refuse(str(error))
    return original(cls, args)


def check_arguments(original: Callable[..., None], args: ServerArgs) -> None:
    """Hook around `ServerArgs.__post_init__`, or where else SGLang resolves its arguments: adapt
    what eLLM needs, refuse what it lacks. Off where a function of SGLang is not as recorded."""
    config = EllmConfig.from_env()
    if config is None or adapter().is_resolved(args):
        original(args)
        return
    if changed := differences():
        turn_off(f"this sglang {installed()} is not the one tested ({'; '.join(changed)})")
        original(args)
        return
    _refuse_unsupported(args, resolved=False)
    if args.page_size not in (None, config.block_tokens):
        _refuse(
            f"--page-size {args.page_size}: eLLM's blocks are SGLang's pages; leave it out, or "
            f"give the value of --ellm-block-tokens ({config.block_tokens})"
        )
    if args.radix_cache_backend not in (None, PREFIX_CACHE):
        _refuse(
            f"--radix-cache-backend {args.radix_cache_backend}: eLLM brings its own; leave it out"
        )
    if args.disable_radix_cache and config.kv_store is not None:
        _refuse(
            f"--disable-radix-cache: what --ellm-kv-store {config.kv_store} has is found through "
            "the prefix cache; leave out one of them"
        )
    _check_replicas(config, args)
    if args.dp_size > 1 and args.tp_size == 1:
        # For each replica SGLang looks for a free port, and lets go of it seconds before the
        # replica listens there: others may have it by then. One without further ranks is told none.
        args.nccl_port = ANY_PORT
    args.page_size = config.block_tokens
    args.radix_cache_backend = PREFIX_CACHE
    if cuda.available():
        cuda.adapt(args)
    original(args)
    if args.model_path.lower() in ("none", "dummy"):
        return
    decided = adapter().resolved(args)
    _refuse_unsupported(decided, resolved=True)
    backend = _attention_backend(config)
    if decided.attention_backend != backend:
        _refuse(
            f"--attention-backend {decided.attention_backend}: eLLM brings its own attention; "
            "leave it out"
        )
    _check_model(config, decided, adapter().model_config(args))


def _check_replicas(config: EllmConfig, args: ServerArgs) -> None:
    """Refuse what several schedulers cannot each have."""
    if args.dp_size == 1:
        return
    of_one = {
        "--ellm-host-path": config.host_path,
        "--ellm-kv-store": config.kv_store,
        "--nccl-port": None if args.nccl_port == ANY_PORT else args.nccl_port,
    }
    for flag, value in of_one.items():
        if value is not None:
            _refuse(
                f"--data-parallel-size {args.dp_size}: {flag} {value} can be one scheduler's, and "
                "there would be several; leave one of them out, or start a server for each "
                "replica behind a router"
            )


def _check_model(config: EllmConfig, args: ServerArgs, model: Any) -> None:
    """Refuse models that eLLM does not support, and a host tier that has no room beside them."""
    architectures = model.hf_config.architectures or ["(none named)"]
    if not ARCHITECTURES.issuperset(architectures):
        _refuse(
            f"--model-path {args.model_path}: architecture {', '.join(architectures)} is not "
            f"supported by eLLM ({', '.join(sorted(ARCHITECTURES))} are); use --ellm-policy {OFF}"
        )
    weights_alone = table()["quantization"].allowed
    if model.quantization not in (None, *weights_alone):
        _refuse(
            f"--model-path {args.model_path}: the model is quantised with {model.quantization}, "
            "and only methods that quantise weights alone are supported by eLLM "
            f"({', '.join(weights_alone)}); use --ellm-policy {OFF}"
        )
    _check_rotation(args, model)
    if config.host_keeps.isdecimal() and int(config.host_keeps) > model.num_hidden_layers:
        _refuse(
            f"--ellm-host-keeps {config.host_keeps}: the model has {model.num_hidden_layers} "
            "layers; give as many at most"
        )
    from ellm_sgl.sglang.host_tier import check_files, check_room

    try:
        if args.kv_cache_dtype == "auto":
            check_room(config, model, args.tp_size)
        check_files(config, args, model)
    except ConfigError as error:
        _refuse(str(error))


def _check_rotation(args: ServerArgs, model: Any) -> None:
    """Refuse LongRoPE where contexts come to be long: SGLang rotates all rows of a step by the long
    factors once one of them is beyond the original context, so that KV which is computed again is
    not what it was."""
    text = model.hf_text_config
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) != "longrope":
        return
    name = "original_max_position_embeddings"
    original = scaling.get(name) or getattr(text, name, None)
    if original is not None and model.context_len > original:
        _refuse(
            f"--model-path {args.model_path}: its positions are rotated by LongRoPE, with which a "
            f"token's KV depends on the other rows of its step beyond {original} tokens; give "
            f"--context-length {original}, or use --ellm-policy {OFF}"
        )


def check_adapted(args: ServerArgs) -> None:
    """Hook before `ServerArgs.check_server_args`, with which SGLang starts its processes: whether
    `check_arguments` has seen these arguments."""
    config = EllmConfig.from_env()
    if config is None:
        return
    decided = adapter().resolved(args)
    if (decided.page_size, decided.radix_cache_backend) != (config.block_tokens, PREFIX_CACHE):
        _refuse(
            "these ServerArgs were made before eLLM was enabled; make them, too, in "
            "`with ellm_sgl.enabled(...):`"
        )


def _attention_backend(config: EllmConfig) -> str:
    """The name under which SGLang finds eLLM's attention on this host; refuses other hosts."""
    if activate() is not None:
        return ATTENTION_BACKEND
    problem = "eLLM runs on x86 CPU hosts so far, and this host is none"
    if cuda.available():
        if (found := cuda.problem(config)) is None:
            return cuda.ATTENTION_BACKEND
        problem = found
    _refuse(f"--ellm-policy: {problem}; or use --ellm-policy {OFF}")


def _refuse_unsupported(args: ServerArgs, resolved: bool) -> None:
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        _refuse(
            "SGLANG_RUST_SERVER=1: requests would come through a server that has neither eLLM's "
            f"checks nor its routes; unset it or use --ellm-policy {OFF}"
        )
    if args.tp_size > 1 and not adapter().times_out_alike:
        for limit in (envs.SGLANG_REQ_WAITING_TIMEOUT, envs.SGLANG_REQ_RUNNING_TIMEOUT):
            if limit.get() > 0:
                _refuse(
                    f"{limit.name}={limit.get():g} with --tp-size {args.tp_size}: each rank looks "
                    f"at its own clock in sglang {installed()}, and one could give up a request "
                    "that another goes on with; unset it, or use sglang 0.5.20"
                )
    if args.enable_mixed_chunk and envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get():
        _refuse(
            "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1 with --enable-mixed-chunk: requests "
            "could end after the step in which they decode has been planned; leave out one of them"
        )
    if said := refusal(args, resolved):
        _refuse(f"{said} or use --ellm-policy {OFF}")


def _parser(flag: Flag) -> Callable[[str], Any]:
    """An argparse type whose error is one sentence, without SGLang's 300 lines of usage."""

    def parse(text: str) -> Any:
        try:
            return flag.parse(text)
        except ValueError:
            _refuse(f"{flag.option} {shown(text)}: give {flag.kind}")

    return parse


def _refuse(message: str) -> NoReturn:
    """A program gets an exception, a shell one line and status 2."""
    if enabling.from_a_program():
        raise ConfigError(message)
    print(f"ellm-sgl: error: {message}", file=sys.stderr)
    sys.exit(2)
