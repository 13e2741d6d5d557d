"""What the eLLM paper (EuroSys'26) reports, as far as it is known here. None: not known."""

from __future__ import annotations

THROUGHPUT_GAIN = 3.03
"""Output tokens per second over whole-request baselines (Figs. 10, 12)."""
TTFT_GAIN = 2.63
"""TTFT of whole-request baselines over eLLM's (Figs. 10, 12)."""
FUSED_TPOT = 0.75
"""TPOT of the fused recompute-decode step over separate passes."""
FUSED_RATIO = 0.4
"""r at which this project compares the two."""
TABLE_2 = {2: (0.0118, 0.0667), 4: (0.0128, 0.0384), 8: (0.0230, 0.0147)}
"""F: (fragmentation, share of time for the map table). That the three columns are F = 2, 4, 8 is
inferred from the project's target of 1.28 % at F = 4."""
PREDICTION_ERROR = 0.13
"""Mean relative error of its latency model."""

DECISION_MS = (4.58, 6.04)
"""Least and largest mean time of a decision (Fig. 16)."""
SPLIT_MS = 0.03
"""Time to choose (l1, l2) and δ."""
