"""Which running requests pause, and when they resume: shared by the built-in policies."""
