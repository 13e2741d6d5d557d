"""What the paper on elastic memory reports of Figs. 9 to 11: its figures, by section.

No text of it. Plots without figures in the text have no claim here.
"""

from __future__ import annotations

SMALL, PAIR, ONE = "llama3-8b-262k, A100", "opt-13b, 2 L40S", "opt-13b, L40S"
"""Its machines (§6.1): Llama3-8B-262K on an A100 of 80 GB; OPT-13B on two L40S of 48 GB, tensor
parallel, and each of the two where prefill and decode are apart."""
CONTEXT = {SMALL: 262_144, PAIR: 2048, ONE: 2048}
"""Tokens of the longest request: OPT's is the model's own."""
HOST_BYTES = {SMALL: 1e12, PAIR: 2e12, ONE: 2e12}
CHUNK = 512
"""Rows of a step of vLLM with chunked prefill (§6.1)."""
SLO_SCALE = 25.0
"""SLOs over TTFT and TPOT of a request alone (§6.1, Metrics); goodput asks for 90 % within both."""

FIXED = {"2k-2k": (2048, 2048), "32k-2k": (32_768, 2048), "128k-8k": (131_072, 8192),
         "1k-512": (1024, 512)}  # fmt: skip
"""Prompt and output tokens of synthetic loads (§6.1, Fig. 10, §6.4)."""
ONLINE = ("2k-2k", "32k-2k", "sharegpt")
"""Fig. 9, by row of panels."""
OFFLINE = ("2k-2k", "32k-2k", "128k-8k")
"""Of Fig. 11 the text names the last; the others are its synthetic loads."""

ACTIVATION_SHARE = 0.40
"""Of memory, in the prefill of 262K tokens by Llama3-8B: above it (§1, Fig. 1(a))."""
TTFT = {"vllm": 295.0, "vllm-cp": 140.0}
"""Each system's TTFT over eLLM's, at the most, on 2k-2k (§6.2, Fig. 9(a))."""
GOODPUT = {"vllm": 2.5, "vllm-cp": 2.26}
"""eLLM's goodput over each system's, at the most over the three loads (§6.2, Fig. 9)."""
OUTPUT = 1.5
"""Output tokens/s over vLLM's, at the most, on 2k-2k (§6.5, the setting of Fig. 9(d))."""
BATCH = 3.0
"""Largest batch over vLLM's on 128k-8k (abstract, §1), for a model that is not named."""
JAMBA = {"total tokens/s": 1.82, "decode tokens/s": 2.32}
"""Over vLLM's, Jamba on 128k-8k (§6.4, Fig. 11)."""
