"""The host tier's file (`--ellm-host-path`): this program's own, and gone when its process is.

```
 free name ──▶ created, locked, header ──▶ all bytes allocated ──▶ mapped ──▶ name removed
     ▲                                               │ the process is killed
     └───────── removed by the next server ◀── header, and nobody holds the lock
```

With its name gone, the file lasts as long as the mapping: no other server can map it, and whatever
ends the process leaves none of the users' KV behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ellm_sgl.config import ConfigError

MAGIC = b"ellm-sgl host tier"
VERSION = 1
_HEADER = struct.Struct("<24sI")
HEADER_BYTES = mmap.ALLOCATIONGRANULARITY
"""In front of what is mapped; as much, so that the mapping may begin behind it."""

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = "give a file in a folder that exists and can be written"
_NAME = "give another name"


def file_of(given: str, rank: int = 0, ranks: int = 1, hidden: bool = False) -> Path:
    """The file of one of `ranks` processes that share a model and its settings.

    Args:
        given: value of the flag; itself the file where there is one process.
        hidden: the one for hidden states, beside the one for KV.
    """
    return Path(given + (f".rank{rank}" if ranks > 1 else "") + (".hidden" if hidden else ""))


def in_memory(given: str) -> bool:
    """Whether files of this name would lie in memory after all: on a tmpfs.

    Args:
        given: value of the flag.
    """
    folder, kind, longest = Path(given).absolute().parent.resolve(), "", -1
    for mount in psutil.disk_partitions(all=True):  # later ones lie over earlier ones
        place = Path(mount.mountpoint)
        if folder.is_relative_to(place) and len(place.parts) >= longest:
            kind, longest = mount.fstype, len(place.parts)
    return kind in ("tmpfs", "ramfs")


def map_file(path: Path, nbytes: int) -> mmap.mmap:
    """So many bytes of a new file, all of them allocated on disk; its name is gone on return.

    Returns:
        Shared memory of `nbytes` bytes, aligned to pages; what it holds is undefined.

    Raises:
        ConfigError: something else has that name, the folder cannot be written, or has no room.
    """
    with _leftover(path) as found:
        if found is not None:  # a new file, not an old one emptied: nobody has the new one open
            _unlink(path, found)
    fd = _create(path)
    try:
        # Locked before it is marked: whoever looks for leftovers locks nothing without a header.
        _lock(path, fd)
        return _fill(path, fd, HEADER_BYTES + nbytes)
    finally:
        _unlink(path, fd)
        os.close(fd)


def _fill(path: Path, fd: int, size: int) -> mmap.mmap:
    try:
        os.write(fd, _HEADER.pack(MAGIC, VERSION))
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size - HEADER_BYTES, offset=HEADER_BYTES)
    except (OSError, OverflowError) as error:  # the latter: more bytes than any file can have
        os.ftruncate(fd, 0)  # so that what is free is told without it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _no_room(path, size, f" ({reason})") from None


def check(path: Path) -> int:
    """Whether `map_file` may have this name; changes nothing.

    Returns:
        Bytes on disk that a dead server's file of this name takes, and would give back.

    Raises:
        ConfigError: as `map_file`, but for room.
    """
    folder = path.absolute().parent
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)):
        raise _error(path, _FOLDER)
    with _leftover(path) as found:
        return 0 if found is None else os.fstat(found).st_blocks * 512


def check_space(given: str, files: Mapping[Path, int]) -> None:
    """Whether there is room for all of one server's files, as far as that can be told beforehand.

    Args:
        given: value of the flag.
        files: bytes that each is to have, without its header.

    Raises:
        ConfigError: there is not.
    """
    size = sum(HEADER_BYTES + nbytes for nbytes in files.values())
    given_back = sum(check(path) for path in files)
    place = os.statvfs(Path(given).absolute().parent)
    # Blocks kept for root count here: only allocating tells whether this process may have them.
    # A file system without a limit reports no blocks at all.
    if place.f_blocks and size > place.f_bfree * place.f_frsize + given_back:
        raise _no_room(Path(given), size)


def _create(path: Path) -> int:
    try:
        return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise _in_use(path) from None
    except OSError as error:
        raise _error(path, f"cannot be made ({error.strerror}); {_FOLDER}") from None


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path) from None
    except OSError as error:  # some network file systems
        raise _error(path, f"cannot be locked ({error.strerror}); give a file elsewhere") from None


@contextlib.contextmanager
def _leftover(path: Path) -> Iterator[int | None]:
    """A dead server's file of this name, open and locked; None where the name is free.

    Raises:
        ConfigError: anything else has the name; it is left as it is.
    """
    fd = _open(path)
    if fd is None:
        yield None
        return
    try:
        _check_header(path, fd)
        _lock(path, fd)
        yield fd
    finally:
        os.close(fd)


def _open(path: Path) -> int | None:
    """The regular file of this name; None if there is none."""
    try:
        mode = os.lstat(path).st_mode  # first: to open a device may do something
        if stat.S_ISLNK(mode):
            raise _error(path, f"is a symbolic link, which is not followed; {_NAME}")
        if stat.S_ISDIR(mode):
            raise _error(path, "is a folder; give a file in it")
        if not stat.S_ISREG(mode):
            raise _error(path, f"is no regular file; {_NAME}")
        return os.open(path, _FLAGS | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _error(path, f"cannot be opened ({error.strerror}); {_NAME}") from None


def _check_header(path: Path, fd: int) -> None:
    header = os.pread(fd, _HEADER.size, 0)
    name, version = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    status = os.fstat(fd)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not ours or name.rstrip(b"\0") != MAGIC:
        raise _error(path, f"exists, and is no file of ellm-sgl's; {_NAME}")
    if version != VERSION:
        raise _error(
            path,
            f"is of another version of ellm-sgl (format {version}, not {VERSION}); remove it, or "
            f"{_NAME}",
        )


def _unlink(path: Path, fd: int) -> None:
    """Remove the name, if it still is this file's."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            path.unlink()


def _error(path: Path, text: str) -> ConfigError:
    return ConfigError(f"--ellm-host-path {path}: {text}")


def _in_use(path: Path) -> ConfigError:
    return _error(path, "is in use by another server; give each a file of its own")


def _no_room(path: Path, size: int, reason: str = "") -> ConfigError:
    folder = path.absolute().parent
    place = os.statvfs(folder)
    return _error(
        path,
        f"{size:,} bytes are needed, and {folder} has {place.f_bavail * place.f_frsize:,} "
        f"free{reason}; free some, give a smaller --ellm-host-kv-tokens, or a file elsewhere",
    )
