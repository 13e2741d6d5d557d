"""How long a step takes: models of the machine, as printed in the paper and as measured.

No torch, no SGLang in here.
"""

from ellm_sgl.latency.base import FetchingLatencyModel, LatencyModel, StepWork
from ellm_sgl.latency.paper import PaperLatencyModel
from ellm_sgl.latency.partition import hidden_layers
from ellm_sgl.latency.profile import HardwareProfile, ModelShape
from ellm_sgl.latency.roofline import RooflineLatencyModel

__all__ = [
    "FetchingLatencyModel",
    "HardwareProfile",
    "LatencyModel",
    "ModelShape",
    "PaperLatencyModel",
    "RooflineLatencyModel",
    "StepWork",
    "hidden_layers",
]
