"""Settings of one server: their fields, flags, ranges and what they resolve to."""

from ellm_sgl.config.ellm_config import (
    DEVICE,
    ELLM,
    ENV,
    HCACHE,
    LATENCY_MODELS,
    MIXED,
    MODES,
    OFF,
    RECOMPUTE,
    ConfigError,
    EllmConfig,
)

__all__ = [
    "DEVICE",
    "ELLM",
    "ENV",
    "HCACHE",
    "LATENCY_MODELS",
    "MIXED",
    "MODES",
    "OFF",
    "RECOMPUTE",
    "ConfigError",
    "EllmConfig",
]
