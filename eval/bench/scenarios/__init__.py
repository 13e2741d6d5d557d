"""The scenarios: `busy_core.BusyCore` is `ellm-sgl bench busy-core`, and so on."""

import importlib
import pkgutil

from ellm_sgl.eval.bench.scenario import Scenario


def _scenario(module: str) -> type[Scenario]:
    """The class that a module is named after."""
    name = module.title().replace("_", "")
    found: type[Scenario] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found


SCENARIOS = {m.name.replace("_", "-"): _scenario(m.name) for m in pkgutil.iter_modules(__path__)}
"""By the name of the command."""
