"""Observe, decide, apply: what each iteration does about memory. No SGLang in here."""

from ellm_sgl.control.book import Arrival, RequestBook
from ellm_sgl.control.elastic import ElasticMemory, Totals
from ellm_sgl.control.loop import ControlLoop, Decision, ServerLimits
from ellm_sgl.control.steps import StepLog
from ellm_sgl.control.work import planned_work

__all__ = [
    "Arrival",
    "ControlLoop",
    "Decision",
    "ElasticMemory",
    "RequestBook",
    "ServerLimits",
    "StepLog",
    "Totals",
    "planned_work",
]
