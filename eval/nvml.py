"""What a GPU did meanwhile, by NVML: utilisation and power, sampled beside a measurement."""

from __future__ import annotations

import importlib
import threading
from types import TracebackType
from typing import Any

INTERVAL_S = 0.1
"""NVML itself looks every 1/6 s to 1 s for utilisation, and about as often for power."""


class Sampler:
    """Samples one device from a thread of its own while in its context; keeps sums, no samples.

    Without NVML it samples nothing, and `summary` says why.

    Args:
        uuid: the device's, as CUDA has it (NVML counts devices that CUDA does not see).
        nvml: the module `pynvml`, which nvidia-ml-py brings, or what stands for it.
        interval_s: seconds between two samples.
    """

    def __init__(self, uuid: str, nvml: Any = None, interval_s: float = INTERVAL_S) -> None:
        self._uuid = uuid
        self._nvml = nvml
        self._interval_s = interval_s
        self._problem: str | None = None
        self._sums = {"sm_percent": _Sum(), "power_w": _Sum()}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            self._problem = "no utilisation and power: pynvml is missing; pip install nvidia-ml-py"
            return self
        self._thread = threading.Thread(target=self._sample, name="nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Once the context is left: how many samples, and mean and greatest of each quantity.

        `sm_percent` is NVML's utilisation, the share of time in which a kernel ran, on however few
        processors (`sm` in `nvidia-smi dmon`); `power_w` is of the whole board. `problem` is there
        if sampling ended early or never began.
        """
        found: dict[str, Any] = {"samples": self._sums["power_w"].count}
        found |= {name: s.to_json() for name, s in self._sums.items() if s.count}
        return found if self._problem is None else {**found, "problem": self._problem}

    def _sample(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                device = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
                while not self._ended.wait(self._interval_s):
                    busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                    power = nvml.nvmlDeviceGetPowerUsage(device) / 1e3
                    self._sums["sm_percent"].add(busy)
                    self._sums["power_w"].add(power)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            self._problem = f"no further utilisation and power: NVML says {error}"


class _Sum:
    """Of samples."""

    def __init__(self) -> None:
        self.count, self._total, self._greatest = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._total += value
        self._greatest = max(self._greatest, value)

    def to_json(self) -> dict[str, float]:
        return {"mean": self._total / self.count, "max": self._greatest}
