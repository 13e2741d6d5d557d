"""`python -m ellm_sgl.sglang.hooks_page` writes docs/sglang-hooks.md to standard output."""

from __future__ import annotations

import sys

from ellm_sgl.sglang.hooks import HOOKS
from ellm_sgl.sglang.versions import VERSIONS, adapter_of

_HEAD = """\
# eLLM's hooks on SGLang

Made from the table in `ellm_sgl/sglang/hooks.py` and the adapters in `ellm_sgl/sglang/versions/`
(`python -m ellm_sgl.sglang.hooks_page > docs/sglang-hooks.md`); a test compares. A target without a
version is the same function in all of them ({versions}). Where the same function takes other
parameters, they are listed below. eLLM stays off where SGLang has others than were recorded.

| target, below `sglang.srt` | hook | what for |
| --- | --- | --- |
"""


def page() -> str:
    """The page, in Markdown."""
    first, *later = VERSIONS
    lines = []
    for hook in HOOKS:
        targets, before = [], ""
        for version in VERSIONS:
            if not hook.is_of(version):
                continue
            target = adapter_of(version).moved.get(hook.target, hook.target)
            if target != before:
                since = "" if version == first else f"from {version}: "
                targets.append(f"{since}`{_short(target)}`")
            before = target
        if hook.until != VERSIONS[-1]:
            targets[-1] += f" (until {hook.until})"
        cells = "<br>".join(targets), f"{hook.kind.lower()} `{hook.ours}`", hook.reason
        lines.append(f"| {' | '.join(cells)} |")
    text = _HEAD.format(versions=", ".join(VERSIONS)) + "\n".join(lines) + "\n"
    for before, version in zip((first, *later), later, strict=False):
        text += "\n".join(_differences(before, version))
    return text


def _differences(before: str, version: str) -> list[str]:
    old, new = adapter_of(before), adapter_of(version)
    lines = [
        "",
        f"## Parameters: {before} to {version}",
        "",
        f"| function | {before} | {version} |",
        "| --- | --- | --- |",
    ]
    for target, parameters in new.signatures.items():
        was = old.signatures.get(target)
        if was is not None and was != parameters:
            gone, added = _only_in(was, parameters), _only_in(parameters, was)
            lines.append(f"| `{_short(target)}` | {gone} | {added} |")
    return [*lines, ""]


def _only_in(one: str, other: str) -> str:
    names, theirs = one.strip("()").split(", "), other.strip("()").split(", ")
    return ", ".join(f"`{name}`" for name in names if name not in theirs and name != "*")


def _short(target: str) -> str:
    return target.removeprefix("sglang.srt.")


if __name__ == "__main__":
    sys.stdout.write(page())
