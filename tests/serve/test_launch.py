"""`ellm_sgl.serve.launch`: what it does before and after SGLang's own `run_server`."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.serve import launch


def test_garbage_is_collected_once_all_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.launch_server
    import sglang.srt.plugins
    import sglang.srt.server_args
    import sglang.srt.utils

    from ellm_sgl.sglang import processes, versions

    collecting: dict[str, bool] = {}

    def arguments(_: list[str]) -> Any:
        collecting["importing"] = gc.isenabled()
        return SimpleNamespace()

    def serve(_: Any) -> None:
        collecting["serving"] = gc.isenabled()
        collecting["frozen"] = gc.get_freeze_count() > 10_000

    monkeypatch.setattr(sglang.srt.plugins, "load_plugins", lambda: None)
    monkeypatch.setattr(sglang.srt.server_args, "prepare_server_args", arguments)
    monkeypatch.setattr(sglang.srt.utils, "kill_process_tree", lambda *_, **__: None)
    monkeypatch.setattr(versions, "adapter", lambda: SimpleNamespace(resolve=lambda _: None))
    monkeypatch.setattr(processes, "may_be_copied", lambda: None)
    monkeypatch.setattr(sglang.launch_server, "run_server", serve)
    try:
        launch.main([])
    finally:
        gc.unfreeze()
        gc.enable()
    assert collecting == {"importing": False, "serving": True, "frozen": True}
