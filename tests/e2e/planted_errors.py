"""Errors in the KV that servers restore, found by SGLang as a plugin of an installed package: what
`ellm-sgl verify` must notice.

`PLANTED_ERROR` names the one to plant in every copy, or every n-th, that the host tier takes:

- zeros: the copy is all zeros;
- stale: the copy holds what another unit of the same block holds, or nothing yet;
- shifted: the copy's values are one slot further on than their keys. (Both alike would change
  nothing: attention has no order, the keys hold their positions.)
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

_ENTRY_POINTS = "[sglang.srt.plugins]\nplanted = planted_errors:register\n"


def install(folder: Path, error: str, every: int = 1) -> dict[str, str]:
    """Put this module into `folder` as an installed package; the environment that plants `error`
    in every so-manieth save."""
    info = folder / "planted_errors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-errors\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "planted_errors.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "PLANTED_ERROR": error, "PLANTED_EVERY": str(every)}


def register() -> None:
    """SGLang calls this in every process of a server."""
    from ellm_sgl.step.transfer.native import NativeStreamer
    from ellm_sgl.step.transfer.python import Streamer

    _plant(NativeStreamer)
    _plant(Streamer)


def _plant(cls: Any) -> None:
    original, saves = cls.save, itertools.count()
    error, every = os.environ["PLANTED_ERROR"], int(os.environ["PLANTED_EVERY"])

    def save(self: Any, device_units: Any, host_units: Any) -> None:
        original(self, device_units, host_units)
        if next(saves) % every:
            return
        copies = self._host[host_units]
        if error == "zeros":
            self._host[host_units] = 0
        elif error == "stale":
            self._host[host_units] = copies.roll(1, 0) if len(copies) > 1 else copies * 0
        elif error == "shifted":  # [units, F, 2, block_tokens, kv_heads, head_dim]
            copies[:, :, 1] = copies[:, :, 1].roll(1, 2)
            self._host[host_units] = copies

    cls.save = save
