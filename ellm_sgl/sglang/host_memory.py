"""What a pool in host memory may come to, by the limits of the machine and of the container.

SGLang asks the machine what is free, also in a container that may have far less: there the kernel
ends the server once it has used what it was promised.
"""

from __future__ import annotations

import logging
from typing import Any

from ellm_sgl.budget.machine import ROOT, container, largest, tightest
from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.host_file import in_memory
from ellm_sgl.memory.step_room import MARGIN_BYTES
from ellm_sgl.sglang.versions import adapter

logger = logging.getLogger(__name__)


def tokens_within(
    settings: EllmConfig, chosen: int, token_bytes: int, host_bytes: int, configurator: Any
) -> int:
    """Tokens that the device pool begins with: those chosen, or, where SGLang chose them for a
    larger machine, as many as the container's memory has room for: of what the host tier leaves,
    the share that is the pool's without one, since steps take their activations of the rest. Each
    of SGLang's replicas chooses as if it were alone.

    Args:
        token_bytes: of KV, on one rank.
        host_bytes: of the host tier, on one rank.
        configurator: SGLang's; its model is loaded.

    Raises:
        ConfigError: so many were given, and there is no room for them.
    """
    from sglang.srt.runtime_context import get_parallel

    arguments = adapter().resolved(configurator.server_args)
    ranks, replicas = get_parallel().tp_size, arguments.dp_size
    processes = ranks * replicas
    all_bytes = token_bytes * processes
    if settings.device_kv_tokens is None and arguments.max_total_tokens is None:
        chosen //= replicas
    # The kernel takes a file's pages back where memory is short: they are no part of what is used.
    on_disk = settings.host_path is not None and not in_memory(settings.host_path)
    host = 0 if on_disk else host_bytes * processes
    _check(settings, all_bytes, host)
    # SGLang has looked at the machine, but as if there were no host tier.
    found = tightest(ROOT) if host > 0 else container(ROOT)
    if found is None or settings.device_kv_tokens is not None:
        return chosen
    left = found.free - host
    room = max(min(int(left * arguments.mem_fraction_static), left - MARGIN_BYTES), 0)
    tokens = min(chosen, room // all_bytes)
    if ranks > 1:  # what is in use changes while they look
        from sglang.srt.distributed import get_tp_group

        tokens = get_tp_group().broadcast_object(tokens)
    if tokens < settings.block_tokens:
        beside = f" beside the host tier's {host:,}" if host else ""
        remedy = "give fewer --ellm-host-kv-tokens" if host else "raise its memory limit"
        raise ConfigError(
            f"{found.of} has {found.free:,} bytes free of {found.limit:,}, no room for a pool of "
            f"KV{beside}; {remedy}"
        )
    if tokens < chosen:
        logger.info(
            "eLLM pool: %d tokens, not %d: %s has %d bytes free of %d",
            tokens, chosen, found.of, found.free, found.limit,
        )  # fmt: skip
    return tokens


def check_pinned(settings: EllmConfig, host_bytes: int, configurator: Any) -> None:
    """Refuse a host tier beside a CUDA device that the machine has no memory for: it is pinned at
    the start, all of it, and by PyTorch in powers of two. What is free counts for this replica's
    alone: another one may have pinned its own already.

    Args:
        host_bytes: on one rank.

    Raises:
        ConfigError: there is no room for it.
    """
    from sglang.srt.runtime_context import get_parallel

    if host_bytes and (settings.host_path is None or in_memory(settings.host_path)):
        ours = (1 << (host_bytes - 1).bit_length()) * get_parallel().tp_size
        replicas = adapter().resolved(configurator.server_args).dp_size
        _check_host(settings, ours * replicas, 0, ours)


def _check(settings: EllmConfig, token_bytes: int, host_bytes: int) -> None:
    """Of sizes that were given: as promises, not as what is free just now, since memory is taken
    when it is used."""

    def taken(tokens: int) -> int:
        nbytes = tokens * token_bytes
        return nbytes if settings.budget is None else min(nbytes, settings.budget.nbytes)

    for name in ("device_kv_tokens", "max_device_kv_tokens"):
        tokens = getattr(settings, name)
        if tokens is None:
            continue
        nbytes = taken(tokens)
        if nbytes > (most := largest(ROOT)).limit:
            raise ConfigError(
                f"--ellm-{name.replace('_', '-')} {tokens}: its KV takes {nbytes:,} bytes, and "
                f"{most.of} has {most.limit:,} in all; give at most {most.limit // token_bytes}"
            )
    if host_bytes:
        _check_host(settings, host_bytes, taken(settings.device_kv_tokens or 0), host_bytes)


def _check_host(settings: EllmConfig, host_bytes: int, device_bytes: int, to_come: int) -> None:
    """Of the host tier, which nobody takes back: it fits beside the pool, and what is in use now,
    weights above all, leaves room for it.

    Args:
        host_bytes, device_bytes: of all replicas,
        to_come: and what of the host tier is surely not in use yet.
    """
    takes = (
        f"--ellm-host-kv-tokens {settings.host_kv_tokens}: the host tier takes {host_bytes:,} bytes"
    )
    if device_bytes + host_bytes > (most := largest(ROOT)).limit:
        raise ConfigError(
            f"{takes} beside the pool's {device_bytes:,}, and {most.of} has {most.limit:,} in "
            "all; give fewer"
        )
    if to_come > (found := tightest(ROOT)).free:
        share = "" if to_come == host_bytes else f", {to_come:,} of them for this replica"
        raise ConfigError(
            f"{takes}{share}, and {found.of} has {found.free:,} free of {found.limit:,}; give fewer"
        )
