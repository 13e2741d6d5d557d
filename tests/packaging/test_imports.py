"""The import graph: layers in one direction, no circles between modules; and no file too long.

Read from the source, nothing is imported. Imports in functions and for type hints count as well.
`pytest -s` prints the graph.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ellm_sgl"
LINKED = ("policies", "kernels", "eval")

LAYERS = (
    ("version", ""),  # `ellm_sgl` itself
    ("worker", "worker"),
    ("config", "config"),
    ("budget", "budget"),
    ("host file", "host_file"),
    ("store", "store"),
    ("latency", "latency"),
    ("policies", "policies"),
    ("settings", "config.resolve"),  # with the policy that they name
    ("memory", "memory"),
    ("kernels", "kernels"),
    ("step", "step"),
    ("engine", "engine"),
    ("client", "client"),
    ("sglang", "sglang"),
    ("eval", "eval"),
    ("serve", "serve"),
)
"""From the lowest; a module imports its own layer and lower ones. The longest prefix counts."""

_PUBLIC = "a public name, imported when it is asked for"
UPWARD: dict[tuple[str, str], str] = {
    ("", "config"): _PUBLIC,
    ("", "sglang.enabling"): _PUBLIC,
    ("", "sglang.offline_engine"): _PUBLIC,
    ("", "sglang.platform.torchvision_ops"): "called when torchvision is about to be imported",
}
"""Imports of a higher layer that are known, and why they are still there."""

CIRCLES: dict[tuple[str, ...], str] = {}
"""Circles that are known, and why they are still there."""

LONGEST = 400
"""Lines of a source file, unless its first paragraphs say why ("Over 400 lines: ...")."""
REASON = f"Over {LONGEST} lines: "


def sources(pattern: str) -> Iterator[Path]:
    """Files of the package, each once: not through the links in `ellm_sgl/`."""
    links = [ROOT / PACKAGE / name for name in LINKED]
    for folder in (ROOT / PACKAGE, *(ROOT / name for name in LINKED)):
        for path in sorted(folder.rglob(pattern)):
            if not any(path.is_relative_to(link) for link in links):
                yield path


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below `ellm_sgl`, that itself as ""."""
    found = {}
    for path in sources("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[1:] if parts[0] == PACKAGE else parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module names in its imports."""
    return {name: set(imports(name, path)) for name, path in modules().items()}


def imports(name: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            named = [str(node.module)]
            named += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        below = {each.removeprefix(PACKAGE).lstrip(".") for each in named if of_ours(each)}
        targets = below & modules().keys()
        # `from package import module` needs the module; the package is only on the way.
        packages = {each for each in targets for other in targets if is_below(other, each)}
        yield from targets - packages - {name}


def of_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def is_below(module: str, package: str) -> bool:
    return module != package and (not package or module.startswith(f"{package}."))


def layer(module: str) -> int:
    """Its place in LAYERS."""
    found = [
        (len(prefix), place)
        for place, (_, prefixes) in enumerate(LAYERS)
        for prefix in prefixes.split() or [""]
        if module == prefix or (prefix and module.startswith(f"{prefix}."))
    ]
    assert found, f"{module} is in no layer"
    return max(found)[1]


def circles() -> list[tuple[str, ...]]:
    """Groups of modules each of which imports, over the others, itself."""
    reach = {name: set(direct) for name, direct in graph().items()}
    grown = True
    while grown:
        grown = False
        for reached in reach.values():
            more = set().union(*(reach[name] for name in reached)) - reached
            reached |= more
            grown = grown or bool(more)
    inside = [name for name in reach if name in reach[name]]
    groups = {tuple(sorted(o for o in reach[m] if m in reach[o])) for m in inside}
    return sorted(groups)


def test_layers_import_in_one_direction() -> None:
    for place, (name, _) in enumerate(LAYERS):
        own = [module for module in modules() if layer(module) == place]
        assert own, f"no module is in the layer {name}"
        below = {layer(each) for module in own for each in graph()[module]} - {place}
        named = ", ".join(LAYERS[each][0] for each in sorted(below, reverse=True))
        print(f"{name} ({len(own)} modules) -> {named or 'nothing'}")
    upward = {
        (module, each)
        for module, imported in graph().items()
        for each in imported
        if layer(each) > layer(module)
    }
    assert upward == UPWARD.keys()


def test_no_circles_between_modules() -> None:
    found = circles()
    print("\ncircles:", found)
    assert set(found) == CIRCLES.keys()


@pytest.mark.parametrize("pattern", ["*.py", "*.cpp", "*.h", "*.cu", "*.cuh"])
def test_a_long_file_says_why(pattern: str) -> None:
    for path in sources(pattern):
        text = path.read_text()
        if text.count("\n") > LONGEST:
            first = " ".join(text.partition("\n\nfrom ")[0].split())
            assert REASON in first, f"{path} is over {LONGEST} lines and does not say why"
