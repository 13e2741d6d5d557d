"""What budgets there are on this machine, for `ellm-sgl memory`; changes nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ellm_sgl.budget.file import FOLDER, PREFIX, LedgerError, LedgerFile, path_of
from ellm_sgl.budget.layout import Row
from ellm_sgl.budget.machine import largest
from ellm_sgl.config import ConfigError
from ellm_sgl.config.sizes import MemoryBudget


@dataclass(frozen=True)
class Sharer:
    """A server that shares a budget."""

    row: Row
    alive: bool
    """If not, its bytes are free as soon as another server looks."""


@dataclass(frozen=True)
class Budget:
    """A budget, or what is wrong with its file."""

    name: str
    nbytes: int = 0
    sharers: tuple[Sharer, ...] = ()
    problem: str | None = None


def check_budget(budget: MemoryBudget, folder: Path | None = None) -> None:
    """Before a server starts: whether it could join.

    Raises:
        ConfigError: there is not so much memory, or the ledger cannot be used.
    """
    flag = f"--ellm-memory-budget {budget.name}:{budget.nbytes}"
    most = largest()
    if budget.nbytes > most.limit:
        raise ConfigError(
            f"{flag}: {most.of} has {most.limit:,} bytes in all; give a smaller budget"
        )
    for found in list_budgets(budget.name, folder):
        if found.problem is not None:
            raise ConfigError(f"{flag}: {found.problem}")
        living = [sharer.row.label for sharer in found.sharers if sharer.alive]
        if living and found.nbytes != budget.nbytes:
            raise ConfigError(
                f"{flag}: its servers ({', '.join(living)}) share {found.nbytes:,} bytes; give all "
                "the same size, or end them first"
            )


def list_budgets(name: str | None = None, folder: Path | None = None) -> list[Budget]:
    """Every budget of this user's, by name, or the one of this name, if there is one."""
    folder = folder or FOLDER
    paths = [path_of(name, folder)] if name is not None else _own(folder)
    found = [_read(path) for path in paths]
    return [budget for budget in found if budget is not None]


def _own(folder: Path) -> list[Path]:
    """Files of this user's budgets: nobody else can read them."""
    found = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                found.append(path)
    return found


def _read(path: Path) -> Budget | None:
    name = path.name.removeprefix(PREFIX)
    try:
        file = LedgerFile(path, create=False)
    except FileNotFoundError:
        return None
    except LedgerError as error:
        return Budget(name, problem=str(error))
    try:
        with file.locked():
            nbytes, rows = file.read()
            found = [(row, file.is_held(i)) for i, row in enumerate(rows) if row is not None]
    except LedgerError as error:
        return Budget(name, problem=str(error))
    finally:
        file.close()
    return Budget(name, nbytes or 0, tuple(Sharer(row, alive) for row, alive in found))
