"""Sampling a GPU: what is kept, that it ends, and what is said where there is no NVML."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.eval.nvml import Sampler

UUID = "GPU-1"


class Nvml:
    """NVML's functions that are used, of a device that takes 100 W more at each sample."""

    class NVMLError(Exception):
        pass

    def __init__(self, samples: int, fails: bool = False) -> None:
        self.begun = self.shut_down = self.sampled = 0
        self._samples, self._fails = samples, fails
        self.enough = threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        self.begun += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUID:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        assert handle == "handle"
        return SimpleNamespace(gpu=50, memory=7)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        assert handle == "handle"
        self.sampled += 1
        if self.sampled >= self._samples:
            self.enough.set()
            if self._fails:
                raise self.NVMLError("GPU is lost")
        return 100_000 * self.sampled


def test_means_and_maxima() -> None:
    nvml = Nvml(samples=3)
    with Sampler(UUID, nvml, interval_s=0.001) as sampler:
        assert nvml.enough.wait(30)
    found = sampler.summary()
    assert (nvml.begun, nvml.shut_down) == (1, 1)
    n = found["samples"]
    assert n == nvml.sampled >= 3
    assert found["sm_percent"] == {"mean": 50, "max": 50}
    assert found["power_w"] == {"mean": pytest.approx(50 * (n + 1)), "max": 100 * n}
    assert "problem" not in found
    assert not any(thread.name == "nvml" for thread in threading.enumerate())


def test_it_waits_between_samples() -> None:
    nvml = Nvml(samples=1)
    with Sampler(UUID, nvml, interval_s=60) as sampler:
        pass
    assert sampler.summary() == {"samples": 0} and nvml.sampled == 0


def test_what_nvml_says_is_kept_with_what_was_sampled() -> None:
    nvml = Nvml(samples=3, fails=True)
    with Sampler(UUID, nvml, interval_s=0.001) as sampler:
        assert nvml.enough.wait(30)
    found = sampler.summary()
    assert found["samples"] == 2 and nvml.shut_down == 1
    assert found["problem"].endswith("NVML says GPU is lost")


def test_a_device_that_nvml_does_not_know() -> None:
    nvml = Nvml(samples=1)
    with Sampler("GPU-2", nvml) as sampler:
        pass
    assert "Not Found" in sampler.summary()["problem"] and nvml.shut_down == 1


def test_without_nvml_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler(UUID) as sampler:
        pass
    found = sampler.summary()
    assert found["samples"] == 0 and "pip install nvidia-ml-py" in found["problem"]
