"""Ragged attention on CUDA devices by FlashInfer's wrappers.

Written against flashinfer-python 0.6.15.post1, which SGLang 0.5.17 pins; how the wrappers are made,
planned and captured is how SGLang's own backend (`layers/attention/flashinfer_backend.py`) does it.
"""
