"""The eLLM paper's evaluation, redone in the simulator; see `ellm-sgl paper`."""
