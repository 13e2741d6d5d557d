"""The host tier's file: this program's own, all of it on disk, and gone with its process."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ellm_sgl.config import ConfigError
from ellm_sgl.host_file import HEADER_BYTES, MAGIC, VERSION, check, file_of, map_file

PAGE = mmap.PAGESIZE
NBYTES = 5 * PAGE + 64
MAKERS = pytest.mark.parametrize(
    "use", [check, lambda path: map_file(path, NBYTES)], ids=["checked", "made"]
)
Use = Callable[[Path], object]
"""What must not touch a file that is another's."""

STOPPED_WHILE_MADE = """
import os, sys
from pathlib import Path
from ellm_sgl.host_file import map_file
allocate = os.posix_fallocate
def stop(*arguments):
    allocate(*arguments)
    print("stopped", flush=True)
    sys.stdin.readline()
os.posix_fallocate = stop
memory = map_file(Path(sys.argv[1]), int(sys.argv[2]))
memory[:] = b"1" * len(memory)
print("made", flush=True)
sys.stdin.readline()
print(sum(memory[:]) == 49 * len(memory))
"""


def header(version: int = VERSION) -> bytes:
    return struct.pack("<24sI", MAGIC, version)


def deleted_files(folder: Path) -> dict[str, int]:
    """Files without a name that this process has open: the name each had, and a descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            place = Path(os.readlink(entry))
            if place.parent == folder and place.name.endswith(" (deleted)"):
                found[place.name.removesuffix(" (deleted)")] = int(entry.name)
    return found


@contextlib.contextmanager
def being_made(path: Path, nbytes: int = NBYTES) -> Iterator[subprocess.Popen[str]]:
    """A process that has allocated the file, and neither mapped nor unlinked it so far."""
    command = [sys.executable, "-c", STOPPED_WHILE_MADE, str(path), str(nbytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "stopped\n"
            yield child
        finally:
            child.kill()


def goes_on(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline()


def test_it_is_memory_of_the_size_asked_for_and_its_name_is_gone(tmp_path: Path) -> None:
    memory = map_file(tmp_path / "tier", NBYTES)
    assert len(memory) == NBYTES and os.listdir(tmp_path) == []
    memory[:] = bytes(i % 251 for i in range(NBYTES))
    fd = deleted_files(tmp_path)["tier"]
    assert os.pread(fd, NBYTES, HEADER_BYTES) == memory[:]
    assert os.pread(fd, len(header()), 0) == header()


def test_all_of_it_is_on_disk_and_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        memory = map_file(tmp_path / "tier", 300 * PAGE)
    finally:
        os.umask(before)
    fd = deleted_files(tmp_path)["tier"]
    status = os.fstat(fd)
    assert status.st_blocks * 512 >= status.st_size == HEADER_BYTES + len(memory)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(fd)


def test_two_of_one_name_never_share_memory(tmp_path: Path) -> None:
    first, second = (map_file(tmp_path / "tier", PAGE) for _ in range(2))
    first[:] = b"1" * PAGE
    second[:] = b"2" * PAGE
    assert first[:] == b"1" * PAGE


def a_file(path: Path) -> None:
    path.write_bytes(b"precious" * PAGE)


def an_empty_file(path: Path) -> None:
    path.touch()


def a_beginning_of_our_header(path: Path) -> None:
    path.write_bytes(header()[:10])


def another_format(path: Path) -> None:
    path.write_bytes(header(VERSION + 1).ljust(NBYTES))


def a_link_to_a_file(path: Path) -> None:
    a_leftover(path.parent / "target")
    path.symlink_to(path.parent / "target")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_leftover(path: Path) -> None:
    path.write_bytes(header().ljust(NBYTES))


TAKEN: dict[Callable[[Path], None], str] = {
    a_file: "exists, and is no file of ellm-sgl's; give another name",
    an_empty_file: "exists, and is no file of ellm-sgl's; give another name",
    a_beginning_of_our_header: "exists, and is no file of ellm-sgl's; give another name",
    another_format: r"is of another version of ellm-sgl \(format 2, not 1\); remove it, or give "
    "another name",
    a_link_to_a_file: "is a symbolic link, which is not followed; give another name",
    a_link_to_nothing: "is a symbolic link, which is not followed; give another name",
    Path.mkdir: "is a folder; give a file in it",
    a_pipe: "is no regular file; give another name",
}


@MAKERS
@pytest.mark.parametrize(("thing", "told"), TAKEN.items(), ids=[t.__name__ for t in TAKEN])
def test_what_is_no_file_of_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, use: Use, thing: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "tier"
    thing(path)

    def look() -> object:
        files = sorted(tmp_path.iterdir())
        plain = [f.read_bytes() for f in files if f.is_file() and not f.is_symlink()]
        status = [(s.st_ino, s.st_mtime_ns, s.st_ctime_ns, s.st_size) for s in map(os.lstat, files)]
        return files, plain, status

    before = look()
    with pytest.raises(ConfigError, match=f"^--ellm-host-path {path}: {told}$"):
        use(path)
    assert look() == before


@MAKERS
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_leftover_of_another_user_is_no_file_of_ours(tmp_path: Path, use: Use) -> None:
    path = tmp_path / "tier"
    a_leftover(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="is no file of ellm-sgl's"):
        use(path)
    assert path.read_bytes() == header().ljust(NBYTES)


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    with being_made(path, 300 * PAGE) as child:
        child.kill()
    old = path.stat()
    assert old.st_size == HEADER_BYTES + 300 * PAGE
    assert check(path) == old.st_blocks * 512 >= old.st_size and path.exists()
    with path.open("rb") as other:  # whoever has it open does not see into the new one
        memory = map_file(path, PAGE)
        memory[:] = b"2" * PAGE
        assert b"2" not in other.read()
    assert os.listdir(tmp_path) == []


@MAKERS
def test_a_file_that_a_live_server_makes_is_refused(tmp_path: Path, use: Use) -> None:
    path = tmp_path / "tier"
    with being_made(path) as child:
        with pytest.raises(ConfigError, match=f"^--ellm-host-path {path}: is in use by another"):
            use(path)
        assert path.stat().st_size == HEADER_BYTES + NBYTES
        assert goes_on(child) == "made\n"
        assert os.listdir(tmp_path) == []
        use(path)
        assert goes_on(child) == "True\n"


def test_whatever_ends_the_process_nothing_is_left(tmp_path: Path) -> None:
    with being_made(tmp_path / "tier") as child:
        assert goes_on(child) == "made\n"
        child.kill()
        assert child.wait() < 0
    assert os.listdir(tmp_path) == []


def test_a_file_of_others_is_not_even_locked(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    a_file(path)
    with path.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is no file of ellm-sgl's"):
            check(path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "tier", Path(__file__) / "tier", Path("")):
        with pytest.raises(ConfigError, match="give a file in "):
            check(path)
    with pytest.raises(
        ConfigError, match=r"cannot be made \(No such file or directory\); give a f"
    ):
        map_file(tmp_path / "no" / "tier", PAGE)
    with pytest.raises(
        ConfigError, match=r"cannot be opened \(File name too long\); give another n"
    ):
        check(tmp_path / ("t" * 300))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # who may write anywhere
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="give a file in a folder that exists and can be wr"):
            check(tmp_path / "tier")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_each_process_has_its_own_names() -> None:
    assert file_of("/a/tier") == Path("/a/tier")
    assert file_of("/a/tier", hidden=True) == Path("/a/tier.hidden")
    names = {file_of("/a/tier", rank, 2, hidden) for rank in range(2) for hidden in (False, True)}
    assert names == {Path(f"/a/tier.rank{r}{end}") for r in range(2) for end in ("", ".hidden")}


def test_nothing_is_left_where_making_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a large file is being allocated."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        map_file(tmp_path / "tier", PAGE)
    assert os.listdir(tmp_path) == [] and deleted_files(tmp_path) == {}
