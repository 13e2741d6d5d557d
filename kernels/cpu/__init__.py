"""Attention over the paged pool in C++ for x86 (AVX-512, AVX2) and any other CPU.

`build` compiles, `library` loads, `attention` is the kernel; `attention.h` begins the C++ side.
Nothing here is imported by importing the package, so that the build needs neither torch nor numpy.
"""
