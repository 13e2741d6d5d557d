"""eLLM from Python: `with ellm_sgl.enabled(policy="fcfs"):` before SGLang's engine is made.

Settings reach SGLang's processes through their environment, so eLLM is on for what is made within
the block. An engine made there keeps eLLM when the block has ended; one made later is stock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ellm_sgl.client.process import SERVER_ENVIRONMENT
from ellm_sgl.config import ENV, EllmConfig
from ellm_sgl.config.resolve import settings_of as read

_from_a_program: ContextVar[bool] = ContextVar("from_a_program", default=False)


@contextmanager
def enabled(**settings: Any) -> Iterator[EllmConfig | None]:
    """Have SGLang's engines and servers that are made in this block run with eLLM.

    For `sglang.Engine`, `sglang.Runtime`, `ServerArgs` and `launch_server`, also in processes that
    are started in the block. Import `ellm_sgl` at the top of the program, before SGLang. The
    block changes this process's environment, so one thread at a time should be in it.

    Args:
        settings: the flags, without `--ellm-` and with underscores: `policy="fcfs"` (the default;
            "off" is stock SGLang), `host_kv_tokens=20_000`, `overlap=False`,
            `policy_options={"rotate": False}`; None is as if it were not given.

    Yields:
        The settings, or None where eLLM is off.

    Raises:
        ConfigError: a ValueError that names a setting that does not exist or makes no sense; and,
            in the block, an argument of SGLang that does not go with eLLM.
    """
    config = read(settings)
    from sglang.srt.plugins import load_plugins

    values = {} if config is None else {**SERVER_ENVIRONMENT, **os.environ, ENV: config.to_json()}
    token = _from_a_program.set(True)
    try:
        with _environment(values, () if config is not None else (ENV,)):
            load_plugins()
            yield config
    finally:
        _from_a_program.reset(token)


@contextmanager
def _environment(values: Mapping[str, str], without: tuple[str, ...]) -> Iterator[None]:
    """Of this process, for a while."""
    before = {name: os.environ.get(name) for name in (ENV, *SERVER_ENVIRONMENT)}
    os.environ.update(values)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def from_a_program() -> bool:
    """Whether what is refused is an exception for the caller, not a line for a shell."""
    return _from_a_program.get()


def note(manager: Any) -> None:
    """Of SGLang's `TokenizerManager`, as it is made: whether its scheduler runs with eLLM."""
    manager.ellm_settings = EllmConfig.from_env()


def settings_of(manager: Any) -> EllmConfig | None:
    """What was noted; None where eLLM is off."""
    found: EllmConfig | None = getattr(manager, "ellm_settings", None)
    return found
