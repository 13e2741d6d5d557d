"""Kernels for CUDA devices: right on the one they ran on (docs/gpu.md), and everywhere else tested
against the reference by stand-ins or an interpreter."""
