"""The native CPU back-end: packed weights and caches, one kernel per operation, instruction set chosen at run time."""

from antiphon.kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
