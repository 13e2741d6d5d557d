"""The versions of SGLang that eLLM runs on, and what is different in each.

All that differs is in one module per version, an `Adapter`; the rest of `ellm_sgl.sglang` is the
same for all of them and asks the adapter of the one that is installed. docs/sglang-versions.md says
how to add one.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.sglang.versions.adapter import Adapter

VERSIONS: tuple[str, ...] = ("0.5.17", "0.5.20", "0.5.23")
"""Those that the tests run with, oldest first. On another one eLLM is off: a hook may be where it
was and mean something else, and outputs that are wrong are worse than none."""


class UnknownVersionError(ConfigError):
    """The SGLang that is installed has no adapter."""


def installed() -> str:
    """The installed version; "none" without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


@cache
def adapter_of(name: str) -> Adapter:
    """The adapter of one of `VERSIONS`."""
    module = importlib.import_module(f"{__name__}.v{name.replace('.', '_')}")
    made: Adapter = module.ADAPTER
    assert made.version == name
    return made


@cache
def adapter() -> Adapter:
    """The adapter of the installed version.

    Raises:
        UnknownVersionError: there is none.
    """
    if (found := installed()) not in VERSIONS:
        raise UnknownVersionError(untested(found))
    return adapter_of(found)


def check_known() -> None:
    """For commands that are about eLLM: servers of another version would serve without it.

    Raises:
        UnknownVersionError: eLLM does not run on the version that is installed.
    """
    adapter()


def untested(found: str) -> str:
    """Why eLLM does not run on such a version, and what to do, in one sentence."""
    *others, last = VERSIONS
    known = f"{', '.join(others)} or {last}" if others else last
    return f"eLLM has not been tested with sglang {found}; install sglang {known}"


def turn_off(problem: str) -> None:
    """Stock SGLang serves, in this process and its children; one line says why."""
    EllmConfig.clear_env()
    print(f"ellm-sgl: warning: {problem}. eLLM is off: SGLang serves as stock.", file=sys.stderr)
