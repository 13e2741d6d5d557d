"""matplotlib, which only those who plot need."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ellm_sgl.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def require_matplotlib(what: str) -> None:
    """Tell before anything is measured rather than after.

    Raises:
        ConfigError: it is not installed; `what` is the command or option that wants it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{what} needs matplotlib: pip install 'ellm-sgl[plot]'")


def check_plot_file(file: Path) -> None:
    """That a plot can be written there.

    Raises:
        ConfigError: matplotlib, the folder, or a name that ends with a format is missing.
    """
    require_matplotlib("--plot")
    if file.suffix not in FORMATS:
        raise ConfigError(f"--plot {file}: give a name that ends with {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}")


def new_figure(**options: Any) -> Figure:
    """A figure with nobody's window."""
    from matplotlib.figure import Figure

    return Figure(layout="constrained", **options)
