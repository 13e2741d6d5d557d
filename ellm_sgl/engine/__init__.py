"""Observe, decide, apply: what each iteration does about memory. No SGLang in here."""

from ellm_sgl.engine.controller import Controller, ServerLimits
from ellm_sgl.engine.decision import Decision, InForce
from ellm_sgl.engine.iteration import Iteration
from ellm_sgl.engine.request_table import Arrival, RequestTable
from ellm_sgl.engine.step_log import StepLog

__all__ = [
    "Arrival",
    "Controller",
    "Decision",
    "InForce",
    "Iteration",
    "RequestTable",
    "ServerLimits",
    "StepLog",
]
