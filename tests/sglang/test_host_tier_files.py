"""Files of the host tier: of whom, how large, and refused before a process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.memory import KVPool, PoolShape
from ellm_sgl.memory.host_tier import HostTier
from ellm_sgl.sglang.host_tier import (
    check_files,
    files,
    make_hidden_pool,
    make_streamer,
    most_host_bytes,
)
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.step import HiddenStates

declare()

SHAPE = PoolShape(num_layers=6, layer_group=2, block_tokens=16)
HEADS, HEAD_DIM, TOKENS = 4, 8, 10 * 16


@dataclass(frozen=True)
class Model:
    """As much of SGLang's `ModelConfig` as is asked for."""

    num_hidden_layers: int = 6
    hidden_size: int = HEADS * HEAD_DIM
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.float32

    def get_num_kv_heads(self, tp_size: int) -> int:
        return HEADS // tp_size


@dataclass(frozen=True)
class Arguments:
    """As much of SGLang's `ServerArgs`, and of its `KVCacheConfigurator`."""

    tp_size: int = 1
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    model_config: Model = field(default_factory=Model)


def settings(
    path: Path, keeps: str = "kv", where: str = "host", tokens: int = TOKENS
) -> EllmConfig:
    return EllmConfig(
        host_path=str(path), host_kv_tokens=tokens, host_keeps=keeps, hidden_on=where, layer_group=2
    )


def build(config: EllmConfig, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The host pools of one rank, as a server makes them: KV, and hidden states."""
    groups = {"kv": 0, "hidden": 3, "3": 2}[config.host_keeps]
    tier = HostTier(0, 3, config.host_kv_tokens // 16 * 3, groups)
    pool = KVPool(SHAPE, 8, HEADS // ranks, HEAD_DIM, torch.float32, "cpu")
    buffers = {}
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_rank=rank, tp_size=ranks):
        hidden = None
        if groups:
            states = make_hidden_pool(config, SHAPE, groups, Arguments())
            hidden = HiddenStates(states, pool)
            if config.hidden_in_file:
                buffers["hidden"] = states.buffer
        buffers["kv"] = make_streamer(config, tier.kv_units, pool, hidden)._host
    return buffers


def names_of(folder: Path) -> set[str]:
    """Files of this folder that this process has mapped and that have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ours = [line.split(maxsplit=5)[5] for line in lines if f"{folder}/" in line]
    assert all(name.endswith(" (deleted)") for name in ours)
    return {Path(name.removesuffix(" (deleted)")).name for name in ours}


@pytest.mark.parametrize("keeps", ["kv", "hidden", "3"])
def test_each_rank_has_files_of_its_own(tmp_path: Path, keeps: str) -> None:
    config = settings(tmp_path / "tier", keeps)
    ranks = [build(config, rank, 2) for rank in range(2)]
    ends = [""] if keeps == "kv" else ["", ".hidden"]
    assert names_of(tmp_path) == {f"tier.rank{r}{end}" for r in range(2) for end in ends}
    for number, rank in enumerate(ranks):
        for buffer in rank.values():
            buffer.fill_(number)
    for number, rank in enumerate(ranks):
        assert all((buffer == number).all() for buffer in rank.values())


def test_one_rank_alone_has_the_file_that_was_given(tmp_path: Path) -> None:
    buffers = build(settings(tmp_path / "tier", "3"), 0, 1)
    assert names_of(tmp_path) == {"tier", "tier.hidden"}
    assert set(buffers) == {"kv", "hidden"}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("keeps", "where"), [("kv", "host"), ("hidden", "host"), ("3", "host"), ("3", "device")]
)
def test_the_sizes_are_known_before(tmp_path: Path, keeps: str, where: str, ranks: int) -> None:
    config = settings(tmp_path / "tier", keeps, where, TOKENS + 5)
    expected = files(config, Arguments(tp_size=ranks), Model())
    made = {}
    for rank in range(ranks):
        name = "tier" if ranks == 1 else f"tier.rank{rank}"
        for kind, buffer in build(config, rank, ranks).items():
            made[tmp_path / (name + (".hidden" if kind == "hidden" else ""))] = buffer.nbytes
    assert expected == made


def test_sizes_that_only_the_server_will_know_are_not_guessed(tmp_path: Path) -> None:
    mixed = files(settings(tmp_path / "tier", "mixed"), Arguments(), Model())
    assert mixed == {tmp_path / "tier": 0, tmp_path / "tier.hidden": 0}
    assert files(settings(tmp_path / "tier"), Arguments(kv_cache_dtype="bf16"), Model()) == {
        tmp_path / "tier": 0
    }


def test_the_host_tiers_file_must_be_ours_to_make(tmp_path: Path) -> None:
    notes, link = tmp_path / "notes.txt", tmp_path / "link"
    notes.write_text("precious")
    link.symlink_to(notes)
    for path in (notes, link, tmp_path, tmp_path / "no" / "file", notes / "file"):
        with pytest.raises(ConfigError, match=f"^--ellm-host-path {path}: .*give a") as refusal:
            check_files(settings(path), Arguments(), Model())
        assert "\n" not in str(refusal.value)
    assert notes.read_text() == "precious"
    check_files(settings(tmp_path / "tier"), Arguments(), Model())
    assert sorted(tmp_path.iterdir()) == [link, notes]


def test_a_name_that_is_taken_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    config = settings(tmp_path / "tier", "3")
    names = {"tier": 1, "tier.hidden": 1, "tier.rank1": 2, "tier.rank0.hidden": 2}
    for name, ranks in names.items():
        check_files(config, Arguments(tp_size=ranks), Model())
        taken = tmp_path / name
        taken.write_text("precious")
        with pytest.raises(ConfigError, match=f"^--ellm-host-path {taken}: exists"):
            check_files(config, Arguments(tp_size=ranks), Model())
        assert taken.read_text() == "precious"
        taken.unlink()
    assert os.listdir(tmp_path) == []
    check_files(EllmConfig(), Arguments(), Model())


def test_a_stores_folders_are_checked_by_the_names_that_ranks_give_them(tmp_path: Path) -> None:
    config = EllmConfig(kv_store=str(tmp_path / "kv"))
    for name, ranks in {"kv": 1, "kv.rank1": 2}.items():
        check_files(config, Arguments(tp_size=ranks), Model())
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
        check_files(config, Arguments(tp_size=3 - ranks), Model())
        with pytest.raises(ConfigError, match=f"{tmp_path / name}.* holds other files"):
            check_files(config, Arguments(tp_size=ranks), Model())
        (tmp_path / name / "precious").unlink()


def test_more_than_the_disk_holds_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    place = os.statvfs(tmp_path)
    token = 6 * 2 * HEADS * HEAD_DIM * 4
    fits = place.f_bfree * place.f_frsize // token * 2 // 3
    told = f"^--ellm-host-path {tmp_path}/tier: .* are needed, and {tmp_path} has .* free; free"
    for ranks in (1, 2):  # of two, each has half the heads: there would be room for one of them
        arguments = Arguments(tp_size=ranks)
        check_files(settings(tmp_path / "tier", tokens=fits), arguments, Model())
        with pytest.raises(ConfigError, match=told):
            check_files(settings(tmp_path / "tier", tokens=2 * fits), arguments, Model())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keeps", ["kv", "hidden", "3"])
def test_a_tier_is_reckoned_with_as_it_will_be(tmp_path: Path, keeps: str, ranks: int) -> None:
    config = settings(tmp_path / "tier", keeps)
    built = sum(pool.nbytes for pool in build(config, rank=0, ranks=ranks).values())
    assert most_of(config, ranks) == built


def test_what_is_kept_elsewhere_takes_nothing_of_the_host() -> None:
    assert most_of(EllmConfig()) == 0
    config = EllmConfig(host_kv_tokens=TOKENS, host_keeps="hidden", hidden_on="device")
    assert most_of(config) == UNIT  # of scratch
    config = EllmConfig(host_kv_tokens=TOKENS, host_keeps="3", hidden_on="device")
    assert most_of(config) == (TOKENS // 16 + 1) * UNIT


@pytest.mark.parametrize(("ranks", "most"), [(1, "kv"), (4, "hidden")])
def test_where_layers_are_yet_to_be_chosen_the_most_is_reckoned_with(ranks: int, most: str) -> None:
    """Heads are divided among ranks, hidden states are not."""
    config = EllmConfig(host_kv_tokens=TOKENS, host_keeps="mixed")
    assert most_of(config, ranks) == most_of(replace(config, host_keeps=most), ranks)


UNIT = KVPool.bytes_per_unit(SHAPE, HEADS, HEAD_DIM, torch.float32)


def most_of(config: EllmConfig, ranks: int = 1) -> int:
    model = Model()
    heads = model.get_num_kv_heads(ranks)
    unit = KVPool.bytes_per_unit(SHAPE, heads, HEAD_DIM, model.dtype)
    return most_host_bytes(config, SHAPE, unit, model.hidden_size * model.dtype.itemsize)
