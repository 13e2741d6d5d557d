"""What the eLLM paper (EuroSys'26) reports: its figures, by section and figure. No text of it.

A case is one of its four loads: a machine (a preset of the simulator) and a data set.
"""

from __future__ import annotations

from dataclasses import dataclass

Case = tuple[str, str]
"""(Preset, data set)."""

SMALLER, LARGER = "llama2-13b", "llama2-70b-pcie"
"""Its models and their devices: 1 A100, and 4 over PCIe without NVLink (§6.1)."""
CHAT_13B, CHAT_70B = (SMALLER, "sharegpt"), (LARGER, "sharegpt")
LONG_13B, LONG_70B = (SMALLER, "l-eval"), (LARGER, "l-eval")
CASES = (CHAT_13B, CHAT_70B, LONG_13B, LONG_70B)

TPOT_SLO_S = {CHAT_13B: 0.050, CHAT_70B: 0.500, LONG_13B: 0.060, LONG_70B: 0.200}
"""Table 1."""
HOST_BYTES = {SMALLER: 40e9, LARGER: 160e9}
"""Host memory for swapped KV (§6.1)."""
MAX_RUNNING = 512
"""Its bound on the batch (§6.7)."""

THROUGHPUT = {
    CHAT_13B: {"recompute": 2.64, "swap": 2.61, "hcache": 1.91},
    CHAT_70B: {"recompute": 2.0, "swap": 2.0, "hcache": 1.6},
    LONG_13B: {"recompute": 2.73, "swap": 3.03, "hcache": 1.61},
    LONG_70B: {"recompute": 2.73, "swap": 3.03, "hcache": 1.61},
}
"""eLLM's tokens per second within the SLO over each baseline's: Figs. 10(a) and 12(a), §6.2. For
L-Eval the text gives the most over both models."""
TTFT = {
    CHAT_13B: {"recompute": 2.63, "swap": 2.59, "hcache": 1.7},
    CHAT_70B: {"recompute": 1.62, "swap": 1.61, "hcache": 1.21},
    LONG_13B: {"recompute": 1.76, "swap": 1.71, "hcache": 1.37},
    LONG_70B: {"recompute": 1.76, "swap": 1.71, "hcache": 1.37},
}
"""Each baseline's TTFT over eLLM's: Figs. 10(b) and 12(b), likewise."""
ATTAINMENT = {
    CHAT_13B: {"ellm": 0.973, "recompute": 0.88, "swap": 0.88, "hcache": 0.928},
    CHAT_70B: {"ellm": 0.986, "recompute": 0.88, "swap": 0.88, "hcache": 0.929},
    LONG_13B: {"ellm": 0.966},
    LONG_70B: {"ellm": 0.974},
}
"""Share of requests within the TPOT SLO: Figs. 10(c) and 12(c). 0.88 is a bound: below it."""
TPOT_MS = {
    CHAT_13B: {"ellm": 48.39, "recompute": 63.91, "swap": 64.57, "hcache": 54.54},
    CHAT_70B: {"ellm": 501.74, "recompute": 680.82, "swap": 667.01, "hcache": 522.2},
}
"""Means (§6.2)."""
RUNNING = {"ellm": 254.64, "recompute": 223.16, "swap": 220.94, "hcache": 240.71}
MOST_RUNNING = 448
"""Requests that run together on 70B, ShareGPT: means, and eLLM's most (Fig. 11(a))."""
UNCACHED = {CHAT_70B: 0.36, LONG_13B: 0.47, LONG_70B: 0.47}
"""r, in the mean: cached ratios of 0.64 and 0.53 (§6.2)."""

FIXED_RATIO = {"tokens/s": 1.57, "running": 2.0, "ttft": 1 - 0.4805}
"""The best of Fig. 4 with TPOT "almost unaffected", over whole requests recomputed or swapped;
running requests and TTFT at r = 0.5 over all cached (Fig. 3(b), where "nearly" doubles)."""
FUSED_RATIO, FUSED_TOKENS, FUSED_TPOT = 0.4, 1.18, 0.75
"""One pass over two, at this r: tokens per second and TPOT (Fig. 5(b))."""

NO_OVERLAP = {CHAT_13B: {"recompute": 1.67}, CHAT_70B: {"recompute": 1.61}}
NO_FUSION = {
    CHAT_13B: {"recompute": 1.85, "swap": 1.83, "hcache": 1.34},
    CHAT_70B: {"recompute": 1.85, "swap": 1.83, "hcache": 1.46},
}
"""Tokens per second over baselines, with a part left out (Fig. 13(a), §6.3)."""
NO_OVERLAP_TTFT, NO_FUSION_TTFT = {CHAT_13B: 1.73, CHAT_70B: 1.4}, {CHAT_13B: 1.96, CHAT_70B: 1.96}
"""The slowest baseline's TTFT over eLLM's, likewise (Fig. 13(b))."""

BASE_RATE = 25.0
"""Requests per second at relative load 1 (§6.4)."""
RELATIVE_LOADS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
KNEE = {
    LONG_13B: {"ellm": 2.0, "hcache": 2.0},
    LONG_70B: {"ellm": 2.5, "recompute": 2.0, "swap": 2.0, "hcache": 2.0},
}
"""Relative load up to which TTFT is steady (Fig. 14, §6.4)."""
GOODPUT = {
    LONG_13B: {"recompute": 6.0, "swap": 6.0, "hcache": 1.5},
    LONG_70B: {"recompute": 5.0, "swap": 5.0, "hcache": 1.67},
}
"""eLLM's over each baseline's (Fig. 15, §6.4)."""
REQUEST_THROUGHPUT = {LONG_70B: 1.25}
"""eLLM's over the baselines': the loads up to which TTFT is steady (§6.4)."""
WITHIN_AT_MOST_LOAD = {LONG_13B: 90}
"""% of eLLM's requests within the SLO at the highest load (§6.4)."""


@dataclass(frozen=True)
class Granularity:
    """One F of Table 2 (§6.5)."""

    fragmentation: float
    table_share: float
    """Of a request's processing time."""
    throughput: float
    """Normalised to F = 8."""


TABLE_2 = {
    2: Granularity(0.0118, 0.0667, 1.13),
    4: Granularity(0.0128, 0.0384, 1.31),
    8: Granularity(0.0230, 0.0147, 1.0),
}

PREDICTION_ERROR = 0.13
"""MAPE of its latency model, on a V100 (§6.6)."""
MODEL_ERROR = {0.2: (-0.016, 0.054), -0.2: (-0.019, 0.034)}
"""By the error of its FLOP/s and bandwidth: change of throughput and of TTFT (§6.6)."""

DECISION_MS = {CHAT_13B: 4.58, LONG_13B: 2.91, CHAT_70B: 6.04, LONG_70B: 3.25}
"""Mean time to solve for b and r (Fig. 16(a))."""
DECISION_8_MS, BATCH_8 = 7.41, 1024
"""On 8 devices, with this bound on the batch (§6.7)."""
LOOKUP_US = {"mean": 15.0, "p90": 25.0, "most": 105.0}
"""One look-up in the map table (Fig. 16(b)): below these."""
SPLIT_MS = 0.03
"""Time to choose the threads' division (§6.7)."""

COMMUNICATION_SHARE = 0.165
"""Of 70B's time on 4 A100: 6.5 % for the MLP and 10.0 % for attention (§7)."""


@dataclass(frozen=True)
class Unsimulated:
    """A figure of the paper's that no simulation here gives."""

    where: str
    what: str
    value: float | None
    unit: str
    why: str


_ON_A_GPU = (
    "Takes GPUs. NVML, which python -m ellm_sgl.eval.gpu asks while stock SGLang and fcfs serve, "
    "tells of power and of time in which any kernel runs."
)
_MLA = "DeepSeek's MLA is not served."
UNSIMULATED = (
    Unsimulated("§1", "SM utilisation over the baselines', at most", 15, " %", _ON_A_GPU),
    Unsimulated("§2.2, Fig. 2", "device memory in use, at least", 50, " %",
                "Under these loads memory is full whenever requests wait."),
    Unsimulated("§2.2, Fig. 2", "SM utilisation while memory is full, at most", 10, " %",
                _ON_A_GPU),
    Unsimulated("§2.2", "SM utilisation of DeepSeek-V2-Lite, median", 35, " %", _MLA),
    Unsimulated("§2.2", "device memory that DeepSeek-V2-Lite has in use then", 97.4, " %", _MLA),
    Unsimulated("§2.3, Fig. 3(b)", "SM utilisation gained at r = 0.5", 8.7, " %", _ON_A_GPU),
    Unsimulated("Fig. 11(b)", "SM utilisation of eLLM, mean", 67.02, " %", _ON_A_GPU),
    Unsimulated("Fig. 11(b)", "SM utilisation of recompute, mean", 58.65, " %", _ON_A_GPU),
    Unsimulated("Fig. 11(b)", "SM utilisation of swap, mean", 58.20, " %", _ON_A_GPU),
    Unsimulated("Fig. 11(b)", "SM utilisation of hcache, mean", 61.20, " %", _ON_A_GPU),
    Unsimulated("§6.2", "tokens per watt over swap", 2.21, "x", _ON_A_GPU),
    Unsimulated("§6.2", "tokens per watt over hcache", 1.43, "x", _ON_A_GPU),
    Unsimulated("§6.5", "fragmentation over long runs: stable", None, "",
                "Blocks of one size here, too; python -m ellm_sgl.eval.soak checks that all of "
                "them come back."),
    Unsimulated("§7", "attention's share of DeepSeek-V2's time, 4 A100", 54, " %", _MLA),
    Unsimulated("§7", "communication for DeepSeek-V2's MLP", 7.3, " %", _MLA),
    Unsimulated("§7", "communication for DeepSeek-V2's attention", 6.4, " %", _MLA),
    Unsimulated("§7", "attention's share of Llama2-70B's time, 4 A100", 37, " %", _ON_A_GPU),
    Unsimulated("§7", "sequence parallelism, several nodes, quantised KV", None, "",
                "Refused at the start: docs/sglang-arguments.md."),
    Unsimulated("§7", "chunked prefill, priorities", None, "",
                "Both are served; priorities by slo-priority (docs/policies.md)."),
)  # fmt: skip
