"""Kernels for NVIDIA GPUs in Triton: whether they can run here, and which tensors they take.

Triton is an optional package and takes a second to load, so this module imports neither it nor the kernels: what needs
them asks `kernels_for`, once there is a tensor on a GPU. With TRITON_INTERPRET=1 in the environment Triton runs the
same kernels on CPU tensors, slowly, which is how tests check them where there is no GPU.

ANTIPHON_TRITON=0 turns them off: PyTorch's own operators run instead, with the same results up to rounding.
"""

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)  # what the kernels are compiled and checked for


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run there; None if they can."""
    if not is_installed():
        return "Triton is not installed (pip install 'antiphon[triton]')"
    if os.environ.get("ANTIPHON_TRITON") == "0":
        return "ANTIPHON_TRITON=0 turns Triton off"
    if dtype not in DTYPES:
        return f"they compute in bfloat16, float16 or float32, not in {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu" and interprets():
        return None
    if device.type != "cuda":
        return f"they need a GPU, not {device} (or TRITON_INTERPRET=1 in the environment, for tests)"
    return _too_old(device)


def _too_old(device: torch.device) -> str | None:
    capability = _capability(device.index)
    if capability is None or capability >= LEAST_CAPABILITY:
        return None
    least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
    return f"they need compute capability {least}, {device} has {found}"


@cache
def _capability(index: int | None) -> tuple[int, int] | None:
    """The compute capability of the GPU with that number, or of the current one; None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return int(major), int(minor)


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interprets() -> bool:
    """Whether Triton runs kernels on CPU tensors. It looks once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_for(x: Tensor, name: str) -> ModuleType | None:
    """The module `name` of this package if a differentiable operator on `x` should use it: on a GPU. None elsewhere."""
    if not x.is_cuda or why_not(x.device, x.dtype) is not None:
        return None
    return load(name)


def load(name: str) -> ModuleType:
    """Import the module `name` of this package, and so Triton."""
    return importlib.import_module(f"{__name__}.{name}")
