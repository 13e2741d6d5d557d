"""How tests start servers."""

STRICT = {
    # SGLang's own memory checks after every step, fatal when they fail.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "OMP_NUM_THREADS": "1",
}
"""A server's environment."""
