"""What a server says of itself once it stands: one screen for whoever started it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ellm_sgl.latency import HardwareProfile
from ellm_sgl.sglang.context import Context

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def screen(scheduler: Scheduler, ours: Context) -> str:
    """Model, memory by owner, policy, SLO, machine, and where to look; for the log."""
    args, settings, shape = scheduler.server_args, ours.settings, ours.table.shape
    weights = sum(p.nbytes for p in scheduler.tp_worker.model_runner.model.parameters())
    tokens = shape.tokens_in(ours.table.num_units)
    options = f" {json.dumps(settings.options)}" if settings.options else ""
    slo = "none: throughput decides (--ellm-tpot-slo-ms)"
    metrics = "/metrics" if args.enable_metrics else "/metrics with --enable-metrics"
    lines = {
        "model": f"{args.model_path} ({scheduler.model_config.dtype}, {shape.num_layers} layers, "
        f"{shape.num_groups} groups)",
        "memory": f"weights {weights / 1e6:.1f} MB, {ours.memory.summary()}",
        "KV": f"at most {tokens:,} tokens on the device, {settings.host_kv_tokens:,} on the host",
        "policy": settings.policy + options,
        "SLO": slo if settings.tpot_slo_ms is None else f"{settings.tpot_slo_ms:g} ms per token",
        "machine": "" if ours.hardware is None else _rates(ours.hardware),
        "look at": f"{args.url()}/ellm/ (a page), /ellm/state, {metrics}",
    }
    return "eLLM is on\n" + "\n".join(f"  {name:8} {text}" for name, text in lines.items())


def _rates(hardware: HardwareProfile) -> str:
    rates = {
        "memory": hardware.device_bytes_per_s,
        "KV": hardware.kv_bytes_per_s or hardware.device_bytes_per_s,
        "host link": hardware.link_bytes_per_s,
    }
    told = ", ".join(f"{name} {rate / 1e9:,.1f} GB/s" for name, rate in rates.items())
    return f"{hardware.name}: {hardware.flops / 1e9:,.0f} GFLOP/s, {told}"
