"""The ledger's file: found or made, locked, and looked at before anything in it is believed.

Two kinds of locks, which do not know of each other. `flock` on all of it, for a turn: nobody else
reads or writes. And on each row, for as long as a server has its memory, one that every process of
it holds (`F_OFD_SETLK`): the kernel lets go of it when the last of them is no more, whatever ended
it, after its memory has gone. Who looks needs no process ids, which mean nothing between
containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ellm_sgl.budget.layout import (
    ROWS,
    SIZE,
    SLOT,
    VERSION,
    CorruptError,
    Row,
    VersionError,
    pack_header,
    pack_row,
    unpack_header,
    unpack_row,
)
from ellm_sgl.budget.waker import Waker
from ellm_sgl.config import ConfigError

FOLDER = Path("/dev/shm")
PREFIX = "ellm-sgl-"
LOCK_S = 1.0
"""Who holds the lock longer is stopped, and not at work: a turn takes well below a millisecond."""
_RETRY_S = 0.002
_FLOCK = struct.Struct("hhqqi4x")
"""C's `struct flock`: type, whence, begin, length, pid."""


class LedgerError(ConfigError):
    """The file is not what it should be; one sentence, with the remedy."""


class LedgerBusyError(LedgerError):
    """Another process holds the lock for too long; it may be free the next time."""


def path_of(name: str, folder: Path | None = None) -> Path:
    """Where the budget of this name is."""
    return (folder or FOLDER) / f"{PREFIX}{name}"


class LedgerFile:
    """One file, open. Not for two threads at a time.

    Args:
        path: of the file.
        create: make it where there is none.

    Raises:
        LedgerError: it cannot be opened, or is somebody else's.
        FileNotFoundError: there is none, and none is to be made.
    """

    def __init__(self, path: Path, create: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            if create:
                raise self.error("its folder does not exist; make it") from None
            raise
        except OSError as error:
            raise self.error(
                f"cannot be opened ({error.strerror}); give another name, or let its owner remove "
                "it"
            ) from None
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            self.close()
            raise self.error("is another user's; give another name")

    def close(self) -> None:
        os.close(self._fd)

    def error(self, text: str) -> LedgerError:
        """With the name of the file."""
        return LedgerError(f"{self.path}: {text}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else reads or writes the file meanwhile.

        Raises:
            LedgerBusyError: somebody else does, for too long.
            LedgerError: the file has lost its name: others would not see what is written to it.
        """
        self._lock()
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LedgerBusyError(
                        f"{self.path}: locked by another process for {LOCK_S:g} s; end the server "
                        "that is stopped"
                    ) from None
                time.sleep(_RETRY_S)
            except OSError as error:
                raise self.error(f"cannot be locked ({error.strerror})") from None
        if not self.has_its_name():
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise self.error(
                "was removed or replaced (logind does that at logout, unless RemoveIPC=no); "
                "restart the servers that shared it"
            )

    def has_its_name(self) -> bool:
        """Whether this is the file that others find."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def contents(self) -> bytes:
        """All that is in it, as it is."""
        return os.pread(self._fd, SIZE + 1, 0)

    def waker(self) -> Waker:
        """For who sleeps until the file is written to."""
        return Waker(self._fd)

    def read(self) -> tuple[int | None, list[Row | None]]:
        """The budget in bytes, None where the file is new, and all rows, free ones included.

        Raises:
            LedgerError: what is in the file is no ledger of this version.
        """
        data = self.contents()
        if not any(data) and len(data) in (0, SIZE):
            return None, [None] * ROWS
        remedy = f"remove it (rm {self.path}) once no server uses it"
        try:
            budget = unpack_header(data[:SLOT].ljust(SLOT, b"\0"))
            if budget is None or len(data) != SIZE:
                raise CorruptError("size")
            slots = (data[at : at + SLOT] for at in range(SLOT, SIZE, SLOT))
            return budget, list(map(unpack_row, slots))
        except VersionError as error:
            raise self.error(
                f"is of another version of ellm-sgl (format {error.args[0]}, not {VERSION}); "
                f"{remedy}, or give another name"
            ) from None
        except CorruptError:
            raise self.error(f"is corrupt; {remedy}") from None

    def begin(self, budget: int) -> None:
        """A ledger without rows, of so many bytes."""
        self._change(os.ftruncate, 0)
        self._change(os.ftruncate, SIZE)
        self._change(os.pwrite, pack_header(budget), 0)

    def write(self, index: int, row: Row | None) -> None:
        self._change(os.pwrite, pack_row(row), _place(index)[0])

    def hold(self, index: int) -> None:
        """This process lives, and what it has is the row's; until the file is closed."""
        request = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, *_place(index), 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            raise self.error(f"cannot be locked ({error.strerror})") from None

    def is_held(self, index: int) -> bool:
        """Whether anybody else holds the row: those whose row it was are still there."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_place(index), 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _change(self, call: object, *arguments: object) -> None:
        assert callable(call)
        try:
            call(self._fd, *arguments)
        except OSError as error:
            raise self.error(f"cannot be written ({error.strerror}); free some memory") from None


def _place(index: int) -> tuple[int, int]:
    """Of a row in the file: where it begins, and its length."""
    return SLOT * (1 + index), SLOT
