"""`ellm-sgl compare`: eLLM, its baseline modes and stock SGLang under the same load."""

from ellm_sgl.eval.compare.measure import Progress, compare
from ellm_sgl.eval.compare.results import Comparison, Run
from ellm_sgl.eval.compare.scenario import OUTPUTS, Scenario

__all__ = ["OUTPUTS", "Comparison", "Progress", "Run", "Scenario", "compare"]
