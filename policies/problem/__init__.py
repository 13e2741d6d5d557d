"""The eLLM paper's Eq. (1), which the policies share: requests that may run together, and how many
of them should."""
