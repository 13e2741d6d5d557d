"""The --ellm-* flags, once for `ellm-sgl serve` and once for `python -m sglang.launch_server`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ellm_sgl.config.ellm_config import HIDDEN_ON, HOST_KEEPS, LATENCY_MODELS, MODES, ConfigError
from ellm_sgl.config.ranges import read_json, shown
from ellm_sgl.config.sizes import read_budget, read_size


@dataclass(frozen=True)
class Flag:
    """One field of `EllmConfig` as a flag."""

    field: str
    parse: Callable[[str], Any]
    kind: str
    """What `parse` accepts, in words."""
    metavar: str
    help: str

    @property
    def option(self) -> str:
        return "--ellm-" + self.field.replace("_", "-")


def _options(text: str) -> dict[str, Any]:
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


def _size(text: str) -> str:
    read_size(text)
    return text


def _budget(text: str) -> str:
    read_budget(text)
    return text


FLAGS: tuple[Flag, ...] = (
    Flag("mode", str, "a name", "NAME",
         f"One of {', '.join(MODES)}: eLLM, or whole requests moved as other systems do, to "
         "compare with; these take no policy. Default ellm."),
    Flag("policy_options", _options, "a JSON object with finite numbers", "JSON",
         "Options of the policy, as a JSON object, for instance '{\"ratio\": 0.3}'."),
    Flag("ratio", float, "a number", "R",
         "Target share of each request's tokens left uncached, 0 <= R < 1; policy fixed-ratio "
         "only. Default 0: all cached until memory runs out."),
    Flag("policy_budget_ms", float, "a number", "MS",
         "Time the policy has in each iteration; later answers are replaced, or, of policies that "
         "never wait, counted. Default 5."),
    Flag("tpot_slo_ms", float, "a number", "MS",
         "Service level objective on the time per output token, of all requests; where one brings "
         "its own, the smaller counts. Default: none."),
    Flag("latency_model", str, "a name", "NAME",
         f"What predicts the time of a step: {' or '.join(LATENCY_MODELS)}. Default roofline."),
    Flag("layer_group", int, "a whole number", "F", "Layers per layer group. Default 4."),
    Flag("block_tokens", int, "a whole number", "N",
         "Tokens per block; also SGLang's page size. Default 16."),
    Flag("device_kv_tokens", int, "a whole number", "N",
         "Tokens of KV that the device pool holds. Default: what SGLang has room for."),
    Flag("max_device_kv_tokens", int, "a whole number", "N",
         "Tokens of KV that the device pool may be told to hold while the server runs; until then "
         "they take addresses only. Default: what it starts with."),
    Flag("min_device_kv_tokens", int, "a whole number", "N",
         "Tokens of KV that this server always has room for, whatever others of its memory budget "
         "ask for, and however long it is idle. Default: one block."),
    Flag("memory_budget", _budget, "NAME:SIZE, for instance demo:8GiB", "NAME:SIZE",
         "Share SIZE bytes of KV with the other servers of this machine that give the same NAME: "
         "memory goes where requests need it. Default: none."),
    Flag("idle_release_s", float, "a number", "S",
         "After so many seconds without a request give memory back: all but what cached prefixes "
         "take. It comes again as requests need it. Default: never."),
    Flag("idle_keep_prefixes", _switch, "on or off", "on|off",
         "Whether an idle server keeps them, too. Default on."),
    Flag("host_kv_tokens", int, "a whole number", "N",
         "Tokens of KV that host memory holds for what left the device. Default 0: none."),
    Flag("host_scaling", _switch, "on or off", "on|off",
         "Let policies count on less of the host tier while tokens come too slowly for their SLO, "
         "and on more while first tokens do. Default off."),
    Flag("host_path", str, "a file", "FILE",
         "Keep the host tier in a new file of this name, mapped into memory: it takes its whole "
         "size at once, and is gone with the server. Default: in memory."),
    Flag("host_keeps", str, f"{', '.join(HOST_KEEPS)} or a whole number", "WHAT",
         "What the host tier keeps of a token: its kv, the hidden states of the layers, from which "
         "KV is projected again, or hidden states of as many of the lowest layers as balance link "
         "and processor (mixed), or of this many layers. Default kv."),
    Flag("hidden_on", str, f"{' or '.join(HIDDEN_ON)}", "WHERE",
         "Where hidden states are kept: in host memory, or in the device pool's own memory, which "
         "then holds less KV; half as much per token where no heads share KV. Default host."),
    Flag("kv_store", str, "a folder", "DIR",
         "Keep full blocks of KV in this folder: prompts and conversations seen before are read "
         "from it instead of computed, after a restart too. One server's at a time. Default: "
         "none."),
    Flag("kv_store_size", _size, "a size, for instance 16GiB", "SIZE",
         "Most that it takes; what was used longest ago goes first. Default 16GiB."),
    Flag("overlap", _switch, "on or off", "on|off",
         "Fetch from host memory while layers compute. Default on."),
    Flag("fusion", _switch, "on or off", "on|off",
         "Recompute in the same pass through the model as the step's own tokens; off is for "
         "measuring what that gains. Default on."),
)  # fmt: skip
"""All but --ellm-policy, which enables eLLM."""
POLICY = "policy"
SETTINGS = (POLICY, *(flag.field for flag in FLAGS))
"""What can be set, by the names of the fields."""


def read_settings(given: Mapping[str, object]) -> dict[str, Any]:
    """Fields of `EllmConfig`, from texts or from Python's values.

    Args:
        given: by the fields' names; each as text, the way a flag takes it, or as a number, a
            boolean (on, off), a dict (JSON) or a path; None is as if it were not given.

    Raises:
        ConfigError: a name that is none, or a value that its flag would not take.
    """
    flags = {flag.field: flag for flag in FLAGS}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in SETTINGS:
            raise ConfigError(f"{shown(name)} is no setting of eLLM; {instead_of(name, SETTINGS)}")
        if value is None:
            continue
        option = "--ellm-policy" if name == POLICY else flags[name].option
        kind = "a name" if name == POLICY else flags[name].kind
        try:
            text = as_text(value)
            values[name] = text if name == POLICY else flags[name].parse(text)
        except (TypeError, ValueError):
            raise ConfigError(f"{option} {shown(value)}: give {kind}") from None
    return values


def as_text(value: object) -> str:
    """A value of Python's or TOML's, the way a flag takes it.

    Raises:
        TypeError, ValueError: there is no such text.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, str | int | float | PurePath):
        return str(value)
    raise TypeError(f"{shown(value)} is no setting's value")


MOST_NAMED = 100
"""Names in a message: all settings of eLLM's, but not all arguments of SGLang's."""


def instead_of(name: object, known: tuple[str, ...]) -> str:
    """What to write instead of a name that is unknown."""
    if near := difflib.get_close_matches(str(name), known, 1):
        return f"did you mean {near[0]}?"
    if len(known) > MOST_NAMED:
        return "docs/sglang-arguments.md lists all arguments"
    return f"give one of {', '.join(sorted(known))}"
