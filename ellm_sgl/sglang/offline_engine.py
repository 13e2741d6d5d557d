"""`ellm_sgl.Engine`: SGLang's `Engine`, with eLLM."""

from __future__ import annotations

from multiprocessing.util import Finalize
from typing import Any

from sglang.srt.entrypoints.engine import Engine as SglangEngine

from ellm_sgl.client.state import resized_to, settled
from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.config.flags import SETTINGS, instead_of
from ellm_sgl.config.ranges import check_finite
from ellm_sgl.sglang.children import run_detokenizer, run_scheduler
from ellm_sgl.sglang.enabling import enabled, settings_of
from ellm_sgl.sglang.replicas import Answer, all_of, ask_replicas, error_of, one_of

PREFIX = "ellm_"
RESIZE_S = 60.0


class Engine(SglangEngine):
    """SGLang's `Engine` with eLLM: the same methods, and those below.

    `Engine(model_path=..., ellm_policy="fcfs", ellm_host_kv_tokens=20_000, ...)`. Unless it is shut
    down before, it ends with the process that made it, one of multiprocessing's included.

    Args:
        kwargs: the flags of `ellm-sgl serve` by their names, with underscores: `ellm_...` are
            eLLM's (as `enabled`, with this prefix), all others SGLang's.

    Raises:
        ConfigError: a ValueError that names the setting, or the argument of SGLang that does not
            go with eLLM.
    """

    run_scheduler_process_func = staticmethod(run_scheduler)
    run_detokenizer_process_func = staticmethod(run_detokenizer)

    def __init__(self, **kwargs: Any) -> None:
        ours = {name: value for name, value in kwargs.items() if name.startswith(PREFIX)}
        known = tuple(PREFIX + name for name in SETTINGS)
        for name in ours:
            if name not in known:
                raise ConfigError(f"{name} is no setting of eLLM; {instead_of(name, known)}")
        theirs = {name: value for name, value in kwargs.items() if name not in ours}
        # A process that multiprocessing has started runs no atexit functions, and would wait for
        # the engine's own processes for ever; also for those of one that did not come to start.
        Finalize(None, self.shutdown, exitpriority=0)
        self.tokenizer_manager = None
        with enabled(**{name.removeprefix(PREFIX): value for name, value in ours.items()}):
            super().__init__(**theirs)

    @property
    def ellm_settings(self) -> EllmConfig | None:
        """What the engine was made with; None where eLLM is off."""
        return settings_of(self.tokenizer_manager)

    def ellm_state(self, integrity: bool = False) -> dict[str, Any]:
        """What `GET /ellm/state` says.

        Args:
            integrity: have the page table checked as well, which takes longer.
        """
        return one_of(self._ask("state", {"integrity": integrity}))

    def ellm_steps(self) -> list[dict[str, Any]]:
        """What `GET /ellm/steps` says: the last measured steps."""
        return all_of(self._ask("steps", {}))

    def set_policy(self, name: str, **options: Any) -> None:
        """Ask another policy from now on.

        Raises:
            ConfigError: there is no such policy, or it does not take these options.
        """
        try:
            check_finite(options, "options")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._ask("policy", {"name": name, "options": options})

    def resize(self, device_kv_tokens: int) -> dict[str, Any]:
        """Have the device pool hold so many tokens; returns when it does, or cannot.

        Returns:
            `resize` of the state: its `outcome` is `applied`, `floor` or `ceiling`, or still `under
            way` after a minute (docs/guide.md); or `bounded`, where something else decides.

        Raises:
            ConfigError: no size that the pool may have.
        """
        self._ask("resize", {"tokens": device_kv_tokens})
        return resized_to(settled(self.ellm_state, RESIZE_S), device_kv_tokens)

    def _ask(self, method: str, body: dict[str, Any]) -> list[Answer]:
        if self.ellm_settings is None:
            raise ConfigError("ellm_policy off: this engine is stock SGLang, and has no such state")
        asked = ask_replicas(self.tokenizer_manager, method, body)
        answers: list[Answer] = self.loop.run_until_complete(asked)
        if error := error_of(answers):
            raise ConfigError(error)
        return answers
