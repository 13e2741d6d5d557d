"""How tests start servers."""

STRICT = {
    # SGLang's own memory checks after every step, fatal when they fail.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "OMP_NUM_THREADS": "1",
}
"""A server's environment."""

ASKED_ABOUT_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"}
"""SGLang's own way for those who ask about a server's health again and again, such as a router:
each answer takes a second and a token. (Servers that are copies answer at once otherwise.)"""
