"""The parts of `ellm-sgl compare`: its loads, its servers, its report."""
