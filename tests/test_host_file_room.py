"""Room for the host tier's file: too little is an error at the start, and nothing later."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ellm_sgl.config import ConfigError
from ellm_sgl.host_file import HEADER_BYTES, check_space, map_file

PAGE = mmap.PAGESIZE

LIMITED = """
import sys
from pathlib import Path
from ellm_sgl.config import ConfigError
from ellm_sgl.host_file import map_file
try:
    map_file(Path(sys.argv[1]), int(sys.argv[2]))
except ConfigError as error:
    print(error)
"""


def test_a_file_larger_than_the_process_may_write_is_refused_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "tier"), str(9 * PAGE)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8 * PAGE, 8 * PAGE)),
    )  # fmt: skip
    assert done.stdout.startswith(
        f"--ellm-host-path {tmp_path}/tier: {HEADER_BYTES + 9 * PAGE:,} bytes are needed, and "
        f"{tmp_path} has "
    )
    assert done.stdout.endswith(
        " free (File too large); free some, give a smaller --ellm-host-kv-tokens, or a file "
        "elsewhere\n"
    )
    assert os.listdir(tmp_path) == []


def test_a_size_that_no_file_can_have_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"tier: {2**63 + HEADER_BYTES:,} bytes are needed"):
        map_file(tmp_path / "tier", 2**63)
    assert os.listdir(tmp_path) == []


ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
from ellm_sgl.config import ConfigError
from ellm_sgl.host_file import check_space, map_file
path, M = Path(sys.argv[1]) / "tier", 1 << 20

def refused(make, *arguments):
    before = os.statvfs(path.parent).f_bfree
    try:
        make(*arguments)
    except ConfigError as error:
        print(error)
    assert os.listdir(path.parent) == [] and os.statvfs(path.parent).f_bfree == before

refused(map_file, path, M)
refused(check_space, str(path), {path: M // 2, path.with_name("tier.hidden"): M // 2})

# A full disk does not end who has mapped a file on it.
memory = map_file(path, M // 2)
rest = path.with_name("rest").open("wb", buffering=0)
try:
    while True:
        rest.write(bytes(1 << 16))
except OSError:
    pass
assert os.statvfs(path.parent).f_bfree == 0
memory[:] = b"1" * len(memory)
os.unlink(rest.name)
rest.close()

# What a dead server left counts as free: it will be removed.
memory.close()
map_file(path, M // 2).close()
allocate = os.posix_fallocate
if os.fork() == 0:
    os.posix_fallocate = lambda *arguments: (allocate(*arguments), os._exit(9))
    map_file(path, 3 * M // 4)
os.wait()
assert path.stat().st_blocks * 512 > 3 * M // 4
check_space(str(path), {path: M // 2})
map_file(path, M // 2)[:] = b"1" * (M // 2)
print("served")
"""


def test_a_full_disk_is_an_error_at_the_start_and_nothing_later(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk} && "
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*alone, mount + "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system of its own can be mounted here")
    done = subprocess.run(
        [*alone, mount + 'exec "$0" "$@"', sys.executable, "-c", ON_A_SMALL_DISK, str(disk)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    needed = [(1 << 20) + HEADER_BYTES, (1 << 20) + 2 * HEADER_BYTES]
    reasons = [" (No space left on device)", ""]
    assert done.stdout.splitlines() == [
        *(
            f"--ellm-host-path {disk}/tier: {n:,} bytes are needed, and {disk} has 1,048,576 free"
            f"{reason}; free some, give a smaller --ellm-host-kv-tokens, or a file elsewhere"
            for n, reason in zip(needed, reasons, strict=True)
        ),
        "served",
    ]


def test_room_is_asked_for_all_files_together(tmp_path: Path) -> None:
    place = os.statvfs(tmp_path)
    half = place.f_bfree * place.f_frsize // 2 + (1 << 34)
    first, second = tmp_path / "tier.rank0", tmp_path / "tier.rank1"
    check_space(f"{tmp_path}/tier", {first: PAGE, second: PAGE})
    with pytest.raises(ConfigError, match=f"^--ellm-host-path {tmp_path}/tier: .* are needed, and"):
        check_space(f"{tmp_path}/tier", {first: half, second: half})
    second.write_text("precious")
    with pytest.raises(ConfigError, match=f"^--ellm-host-path {second}: exists"):
        check_space(f"{tmp_path}/tier", {first: PAGE, second: PAGE})
    assert os.listdir(tmp_path) == [second.name]
