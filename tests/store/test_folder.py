"""The store's folder: one server's, within its size, and never somebody else's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ellm_sgl.config import ConfigError
from ellm_sgl.store import StoreFolder, check_folder
from ellm_sgl.store.folder import LOCK, MOST_PARTS
from tests.store.scene import BLOCK_BYTES, MARK, keys_of, let_go, opened, put, read

OTHER = "f" * 32


def test_a_folder_is_one_servers_at_a_time(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path, 1000)
    with pytest.raises(ConfigError, match="is in use by another server; give each"):
        StoreFolder(tmp_path, 1000)
    folder.close()
    StoreFolder(tmp_path, 1000).close()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds other files; give an empty folder"):
        check_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"--ellm-kv-store {file}: is no folder"):
        check_folder(file)
    with pytest.raises(ConfigError, match="is no folder that can be written"):
        check_folder(tmp_path / "none" / "below")
    check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()  # checking makes nothing


def test_other_models_stay_while_there_is_room(tmp_path: Path) -> None:
    """The one used longest ago goes first; files that are no store's stay."""
    first = opened(tmp_path, blocks=12, mark=OTHER)
    put(first, keys_of(1, 4))
    let_go(first)
    os.utime(tmp_path / OTHER, (1, 1))
    (tmp_path / "notes").write_text("mine")
    second = opened(tmp_path, blocks=12)
    put(second, keys_of(2, 4))
    let_go(second)
    again = opened(tmp_path, blocks=12, mark=OTHER)
    assert read(again, keys_of(1, 4)) == 4
    assert read(again, keys_of(2, 4)) == 0  # another model's KV is not this one's
    let_go(again)
    grown = opened(tmp_path, blocks=12)
    put(grown, keys_of(3, 4))
    assert (tmp_path / OTHER).exists()
    put(grown, keys_of(4, 4))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([MARK, LOCK, "notes"])


def test_a_smaller_size_is_kept_to_at_once(tmp_path: Path) -> None:
    """Though the part that is opened takes nothing more."""
    first = opened(tmp_path, blocks=12, mark=OTHER)
    put(first, keys_of(1, 8))
    let_go(first)
    second = opened(tmp_path, blocks=12)
    put(second, keys_of(2, 4))
    let_go(second)
    opened(tmp_path, blocks=11)
    assert not (tmp_path / OTHER).exists()


def test_parts_are_not_without_number(tmp_path: Path) -> None:
    """One that is trained leaves a part behind with each of its weights."""
    for number in range(3 * MOST_PARTS):
        let_go(opened(tmp_path, mark=f"{number:032x}"))
        os.utime(tmp_path / f"{number:032x}", (number, number))
    parts = sorted(int(p.name, 16) for p in tmp_path.iterdir() if p.name != LOCK)
    assert parts == list(range(2 * MOST_PARTS, 3 * MOST_PARTS))


def test_others_cannot_read_it(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    put(store, keys_of(1, 1))
    for path in (tmp_path / "kv", tmp_path / "kv" / MARK):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "kv" / MARK / "blocks").stat().st_size == BLOCK_BYTES
