"""The store's folder: one server's at a time, with a part for each fingerprint, within a size.

Parts of other fingerprints (another model, other weights) stay while there is room for them; the
one that was used longest ago goes first.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from ellm_sgl.config import ConfigError

LOCK = "ellm-sgl-kv-store.lock"
"""Its name marks the folder as a store's, so that nothing else is ever removed."""
_PART = re.compile(r"[0-9a-f]{32}")
MOST_PARTS = 16
"""A server that is trained has other weights, and so another part, after every update."""


def check_folder(path: Path) -> None:
    """Whether this can be a store's folder; changes nothing.

    Raises:
        ConfigError: it is a file, cannot be written, or holds what is not a store's.
    """
    if not path.exists():
        above = path.absolute().parent
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise _error(path, f"{above} is no folder that can be written; give another")
        return
    if not path.is_dir():
        raise _error(path, "is no folder; give another name")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _error(path, "cannot be written; give another folder")
    if not (path / LOCK).exists() and any(path.iterdir()):
        raise _error(path, "holds other files; give an empty folder, or a new name")


class StoreFolder:
    """A folder, held until `close` or the end of the process.

    Args:
        path: of the folder; made where there is none.
        most_bytes: that all parts may take.

    Raises:
        ConfigError: it cannot be a store's, or another server uses it.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        check_folder(path)
        self.path = path
        self.most_bytes = most_bytes
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _error(path, f"cannot be written ({error.strerror}); give another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                text = "is in use by another server; give each a folder of its own"
            else:
                text = f"cannot be locked ({error.strerror}); give a folder elsewhere"
            raise _error(path, text) from None

    def close(self) -> None:
        os.close(self._lock)

    def part(self, fingerprint: str) -> Path:
        """The part of one fingerprint, 32 hexadecimal digits; made where there is none."""
        assert _PART.fullmatch(fingerprint)
        part = self.path / fingerprint
        part.mkdir(mode=0o700, exist_ok=True)
        os.utime(part)
        return part

    def make_room(self, part: Path, nbytes: int) -> None:
        """Remove other parts, the one used longest ago first, until this one may take so many
        bytes, and there are no more than `MOST_PARTS`."""
        others = [p for p in self.path.iterdir() if _PART.fullmatch(p.name) and p != part]
        others.sort(key=lambda p: p.stat().st_mtime)
        sizes = {p: sum(f.stat().st_size for f in p.iterdir()) for p in others}
        while len(others) >= MOST_PARTS or (
            others and sum(sizes[p] for p in others) + nbytes > self.most_bytes
        ):
            shutil.rmtree(others.pop(0))


def _error(path: Path, text: str) -> ConfigError:
    return ConfigError(f"--ellm-kv-store {path}: {text}")
