"""The scenarios: `busy_core.BusyCore` is `ellm-sgl bench busy-core`, and so on."""

import importlib
from typing import Any

from ellm_sgl.eval.bench.scenario import Scenario


def scenario(name: str) -> type[Scenario[Any, Any]]:
    """The class of that name, which has hyphens between its words."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    found: type[Scenario[Any, Any]] = getattr(module, name.title().replace("-", ""))
    return found
