"""Each rank of a CPU host on cores of its own, as SGLang's own CPU engine has them."""

from __future__ import annotations

import logging
import os

import torch

from ellm_sgl.config import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's: the CPUs of each rank, as `0-31|32-63`; `all`, or nothing, gives each a NUMA node."""


def bind(cpus: str, **rank: int) -> None:
    """Hook after `init_threads_binding`, before the first weight is loaded: the rank's threads run
    where SGLang has answered that they shall, and memory they touch first is of that node. A
    single rank whose CPUs nobody named has the whole machine.

    One that may not use all of its node, in a container, is left where it is.

    Args:
        cpus: SGLang's answer, as `0-31` or `0,2,4`.
        rank: `tp_size`, from SGLang 0.5.20 on `world_size`; and which of them this is.

    Raises:
        ConfigError: these are no CPUs, or none this process may use.
    """
    named = os.environ.get(VARIABLE, "") not in ("", "all")
    alone = rank.get("world_size", rank.get("tp_size", 1)) == 1
    if not named and (alone or not cpus):  # a container may have nothing of a rank's node
        return
    may_use = os.sched_getaffinity(0)
    chosen = cpus_of(cpus)
    if not chosen <= may_use:
        if not named:
            return
        raise ConfigError(
            f"{VARIABLE} {cpus}: this process may use CPUs {','.join(map(str, sorted(may_use)))}; "
            f"name some of them for each rank"
        )
    os.sched_setaffinity(0, chosen)  # threads that are started from now on inherit it
    torch.set_num_threads(min(torch.get_num_threads(), len(chosen)))
    logger.info("eLLM: this rank's %d threads run on CPUs %s", torch.get_num_threads(), cpus)


def cpus_of(text: str) -> set[int]:
    """CPUs that a list such as `0-3,8` names.

    Raises:
        ConfigError: it is no such list.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if (
            len(ends) > 2
            or not all(end.isdecimal() for end in ends)
            or int(ends[0]) > int(ends[-1])
        ):
            raise ConfigError(f"{VARIABLE} {text!r}: name CPUs as 0-31 or 0,2,4; | between ranks")
        chosen.update(range(int(ends[0]), int(ends[-1]) + 1))
    return chosen
