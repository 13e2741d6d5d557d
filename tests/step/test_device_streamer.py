"""The streamer for CUDA, on whatever device there is: on the CPU, PyTorch's streams run at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ellm_sgl.step import DeviceStreamer
from ellm_sgl.step.restoration import GroupTransfer

UNIT = (2, 2, 16, 4, 128)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def pools(device: str, units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host units filled with their own number, pinned where there is a device; device units -1."""
    numbers = torch.arange(units, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1)
    host = torch.empty(units, *UNIT, pin_memory=device == "cuda")
    host.copy_(numbers.expand(units, *UNIT))
    return host, torch.full((units, *UNIT), -1.0, device=device)


def transfer(sources: list[int], targets: list[int]) -> GroupTransfer:
    return GroupTransfer(torch.tensor(sources), torch.tensor(targets))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_group_finds_its_units_when_it_attends(
    device: str, overlap: bool, slots: int
) -> None:
    """Groups attend behind long work, which the copies must not overtake."""
    host, pool = pools(device, 60)
    streamer = DeviceStreamer(host, pool, slots, overlap)
    rings = [list(range(1 + 4 * s, 5 + 4 * s)) for s in range(slots)]
    sources = [[20 + 4 * g, 21 + 4 * g, 40 + g, 10 + g] for g in range(6)]
    groups = [transfer(of, rings[g % slots]) for g, of in enumerate(sources)]
    groups[3] = transfer([], [])
    busy = torch.randn(1024, 1024, device=device)
    for _ in range(3):
        seen = []
        with streamer.running(groups):
            for g in range(6):
                streamer.wait(g)
                for _ in range(20 if device == "cuda" else 0):
                    busy = torch.tanh(busy @ busy)
                seen.append(pool[rings[g % slots]].clone())
                streamer.done(g)
        for g in (0, 1, 2, 4, 5):
            assert seen[g].flatten(1).amin(1).tolist() == sources[g]
            assert seen[g].flatten(1).amax(1).tolist() == sources[g]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_is_what_the_step_before_wrote(device: str) -> None:
    host, pool = pools(device, 8)
    streamer = DeviceStreamer(host, pool, slots=2)
    with streamer.running(()):
        pool[4] = 42.0
    streamer.save(np.array([4, 5], np.int32), np.array([2, 3], np.int32))
    with streamer.running([transfer([2, 6], [1, 7])], ahead=transfer([1], [3])):
        pool[4] = 43.0  # the unit has a new owner
        streamer.wait(0)
        fetched = pool[[1, 7]].clone()
        streamer.done(0)
    with streamer.running(()):
        assert pool[3].min().item() == pool[3].max().item() == 1.0, "fetched by the step before"
    assert fetched.flatten(1).amin(1).tolist() == [42.0, 6.0]
    assert [float(host[u].min()) for u in (2, 3)] == [42.0, -1.0]


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    host, pool = pools("cpu", 12)
    streamer = DeviceStreamer(host, pool, slots=2)
    with pytest.raises(RuntimeError, match="layer"), streamer.running([transfer([7], [1])] * 4):
        raise RuntimeError("a layer failed")
    with streamer.running(()):
        streamer.wait(0)
        streamer.done(0)
    with streamer.running([transfer([9], [3])]):
        streamer.wait(0)
    assert float(pool[3].min()) == 9
