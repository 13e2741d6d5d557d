"""First come, first served: the paper's batch and ratio problem."""

from ellm_sgl.policies.fcfs.policy import Fcfs

__all__ = ["Fcfs"]
