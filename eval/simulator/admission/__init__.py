"""Who joins a simulated server's batch, who loses their place when memory is short, and where they
then wait."""

from ellm_sgl.eval.simulator.admission.base import Admission
from ellm_sgl.eval.simulator.admission.sglang import SglangAdmission
from ellm_sgl.eval.simulator.admission.vllm import MixedAdmission, PaperAdmission, VllmAdmission

__all__ = ["Admission", "MixedAdmission", "PaperAdmission", "SglangAdmission", "VllmAdmission"]
