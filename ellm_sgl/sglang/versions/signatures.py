"""The parameters of SGLang's functions that eLLM hooks, overrides or calls by name.

`python -m ellm_sgl.sglang.versions.signatures` prints those of the installed SGLang as the record
of its version (`v0_5_17.json`); with `--against 0.5.17`, what is different from that one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pkgutil
from collections.abc import Iterable, Mapping

from ellm_sgl.sglang.hooks import hooks_of, used_by
from ellm_sgl.sglang.versions import adapter, adapter_of, installed

ABSENT = "(absent)"
empty = inspect.Parameter.empty


def signature_of(target: str) -> str:
    """Names and kinds of a function's parameters, and which may be left out: "(self, a, *, b=)".
    Annotations and defaults are left out: their text depends on Python. Sees through hooks."""
    try:
        named = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return ABSENT
    function = inspect.unwrap(named)
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else ...)
        for parameter in signature.parameters.values()
    ]
    if inspect.ismethod(named) and not inspect.ismethod(function):
        del parameters[0]  # the class: below its hook a class's method is bound no more
    bare = signature.replace(parameters=parameters, return_annotation=empty)
    return str(bare).replace("=Ellipsis", "=")


def found(targets: Iterable[str]) -> dict[str, str]:
    """What the installed SGLang has. Imports the parts of it named."""
    return {target: signature_of(target) for target in targets}


def targets_of(version: str) -> list[str]:
    """All that is looked at in a version, each once, in the order of the tables."""
    hooked = (hook.target for hook in hooks_of(version))
    return list(dict.fromkeys((*hooked, *used_by(version))))


def differences() -> list[str]:
    """Each function of the installed version that is not as recorded, in words; none where all is
    well. Imports most of SGLang."""
    recorded = adapter().signatures
    here = found(targets_of(installed()))
    return [
        f"{target} is {here[target]}, recorded {recorded.get(target, 'nowhere')}"
        for target in here
        if here[target] != recorded.get(target)
    ]


def _compared(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    lines = []
    for target in before:
        if before[target] != after[target]:
            lines += [target, f"    was {before[target]}", f"    is  {after[target]}"]
    return lines


def main() -> None:
    from ellm_sgl.sglang.platform.torchvision_ops import declare

    declare()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="VERSION", help="print what is different from it")
    against = parser.parse_args().against
    if against is None:
        print(json.dumps(found(targets_of(installed())), indent=1))
        return
    print("\n".join(_compared(adapter_of(against).signatures, found(targets_of(against)))))


if __name__ == "__main__":
    main()
