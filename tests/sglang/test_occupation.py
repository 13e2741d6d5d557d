"""While memory is released the server is paused where requests come in, too, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from ellm_sgl.config import EllmConfig
from ellm_sgl.sglang import cuda, occupation_asked
from ellm_sgl.sglang.platform.torchvision_ops import declare

declare()
TAGS = SimpleNamespace(tags=["kv_cache"])


def test_a_cuda_device_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests come in: everybody would lose their KV for nothing."""
    monkeypatch.setattr(cuda, "available", lambda: True)
    manager = Manager()
    with pytest.raises(ValueError, match="on CPU hosts only"):
        asyncio.run(manager.release())
    assert not manager.asked and not manager.is_pause


class Manager:
    """SGLang's own pauses and updates, of a manager whose scheduler does all that it is asked."""

    def __init__(self) -> None:
        from sglang.srt.utils.aio_rwlock import RWLock

        self.ellm_settings: EllmConfig | None = EllmConfig()
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.config_value = lambda name: "auto"
        self.mm_processor = None
        self.asked: list[str] = []

    async def _answer(self, *asked: Any) -> Any:
        await asyncio.sleep(0)
        self.asked.append(type(asked[-1]).__name__)
        return True, "", 0

    def auto_create_handle_loop(self) -> None:
        """No answers come over a socket here."""

    _async_dispatch_to_scheduler = _answer
    _wait_for_model_update_from_disk = _answer
    release_memory_occupation_communicator = _answer
    resume_memory_occupation_communicator = _answer

    async def release(self) -> None:
        from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin as Mixin

        await occupation_asked.release(Mixin.release_memory_occupation, self, TAGS)

    async def resume(self) -> None:
        from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin as Mixin

        await occupation_asked.resume(Mixin.resume_memory_occupation, self, TAGS)

    async def pause(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        request = PauseGenerationReqInput(mode="retract")
        await occupation_asked.pause(TokenizerManager.pause_generation, self, request)

    async def go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        request = ContinueGenerationReqInput()
        await occupation_asked.go_on(TokenizerManager.continue_generation, self, request)

    async def update(self) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        request = UpdateWeightFromDiskReqInput(model_path="new")
        await TokenizerManager.update_weights_from_disk(self, request)

    async def come(self) -> None:
        """As `generate_request` begins."""
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)


def run(told: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(told, 20))


def test_new_weights_do_not_wait_for_requests_that_wait_for_memory() -> None:
    async def told() -> None:
        manager = Manager()
        async with manager.model_update_lock.reader_lock:  # a request is under way
            await manager.release()
            await asyncio.wait_for(manager.update(), 5)
            await manager.resume()
            assert not manager.is_pause
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(manager.update(), 0.2)

    run(told())


def test_who_comes_while_memory_is_released_goes_on_with_it() -> None:
    async def told() -> None:
        manager = Manager()
        for _ in range(2):
            await manager.release()
        coming = asyncio.create_task(manager.come())
        await manager.go_on()
        await asyncio.sleep(0.05)
        assert not coming.done(), "there is no memory"
        await manager.resume()
        await asyncio.wait_for(coming, 5)

    run(told())


@pytest.mark.parametrize(
    ("told", "paused"),
    [
        ("release resume", False),
        ("resume", False),
        ("pause release resume", True),
        ("pause release release resume", True),
        ("release pause resume", True),
        ("release pause go_on resume", False),
        ("pause release go_on resume", False),
        ("pause release go_on pause resume", True),
        ("pause release resume go_on", False),
        ("pause resume", True),
        ("release resume resume release", True),
    ],
)
def test_a_pause_is_over_when_everybody_who_wanted_it_says_so(told: str, paused: bool) -> None:
    async def tell() -> bool:
        manager = Manager()
        for each in told.split():
            await getattr(manager, each)()
        assert len(manager.asked) == len(told.split()), "the scheduler is told of each"
        return manager.is_pause

    assert asyncio.run(tell()) == paused


def test_where_ellm_is_off_sglang_does_what_it_does() -> None:
    async def tell() -> None:
        manager = Manager()
        manager.ellm_settings = None
        await manager.release()
        assert not manager.is_pause

    run(tell())


def test_other_memory_is_refused_before_anything_has_happened() -> None:
    async def tell() -> None:
        manager = Manager()
        for hook in (occupation_asked.release, occupation_asked.resume):
            with pytest.raises(ValueError, match="--enable-memory-saver"):
                await hook(pytest.fail, manager, SimpleNamespace(tags=["weights"]))
        assert not manager.is_pause

    run(tell())
