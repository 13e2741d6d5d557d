"""A simulator: the server's policies, control loop and page table, with a latency model for the
device and a virtual clock."""

from ellm_sgl.eval.simulator.engine import Simulation
from ellm_sgl.eval.simulator.load import Load
from ellm_sgl.eval.simulator.machines import Machine, preset
from ellm_sgl.eval.simulator.report import SimReport, simulate
from ellm_sgl.eval.simulator.settings import MODES, Settings

__all__ = [
    "MODES",
    "Load",
    "Machine",
    "Settings",
    "SimReport",
    "Simulation",
    "preset",
    "simulate",
]
