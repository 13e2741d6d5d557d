"""The fused recompute-decode attention kernel for CUDA devices, in Triton."""
