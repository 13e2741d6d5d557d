"""How long a step takes: models of the machine, as printed in the paper and as measured.

No torch, no SGLang in here.
"""

from collections.abc import Callable, Mapping

from ellm_sgl.config import LATENCY_MODELS
from ellm_sgl.latency.base import (
    NO_WORK,
    FetchingLatencyModel,
    HostCopies,
    LatencyModel,
    StepWork,
)
from ellm_sgl.latency.paper import PaperLatencyModel
from ellm_sgl.latency.partition import hidden_layers
from ellm_sgl.latency.profile import HardwareProfile, ModelShape
from ellm_sgl.latency.roofline import RooflineLatencyModel

BY_NAME: Mapping[str, Callable[[ModelShape, HardwareProfile], LatencyModel]] = dict(
    zip(LATENCY_MODELS, (RooflineLatencyModel, PaperLatencyModel), strict=True)
)
"""What `--ellm-latency-model` names."""

__all__ = [
    "BY_NAME",
    "NO_WORK",
    "FetchingLatencyModel",
    "HardwareProfile",
    "HostCopies",
    "LatencyModel",
    "ModelShape",
    "PaperLatencyModel",
    "RooflineLatencyModel",
    "StepWork",
    "hidden_layers",
]
