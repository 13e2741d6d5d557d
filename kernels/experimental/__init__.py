"""Kernels that have never run on a device: written and tested against the reference, by stand-ins
or an interpreter, on machines without one."""
