"""Chooses the kernel back-end once, at start, and says why."""

import torch

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference.backend import ReferenceBackend

_log = get_logger("kernels")
NATIVE_DTYPES = (torch.bfloat16, torch.float32)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    """`name` is "auto", "cpu" (native packed kernels) or "reference" (plain PyTorch)."""
    if name not in ("auto", "cpu", "reference"):
        raise UserError(f"kernels {name!r} do not exist: use auto, cpu or reference")
    native_fits = device.type == "cpu" and dtype in NATIVE_DTYPES
    if name == "cpu" and not native_fits:
        raise UserError(f"native kernels run on cpu in bfloat16 or float32, not {dtype} on {device}: use reference")
    if native_fits and name != "reference":
        return CpuBackend(dtype)
    if name == "auto":
        _log.info("kernels: reference (no native kernels for %s on %s)", dtype, device)
    return ReferenceBackend(device, dtype)


def resolve_device(name: str, index: int) -> torch.device:
    """The device of worker `index`: "cpu", "cuda" (workers take turns over the GPUs), or "cuda:2" for all of them."""
    if name == "cpu":
        return torch.device("cpu")
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UserError("--device cuda: this PyTorch sees no CUDA device; use --device cpu or install a CUDA build")
        if ":" in name:
            return torch.device(name)
        return torch.device("cuda", index % torch.cuda.device_count())
    raise UserError(f"device {name!r} is not supported: use cpu or cuda")


def resolve_dtype(name: str) -> torch.dtype:
    """ "bfloat16" and friends, as spelled in `config.json`."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise UserError(f"dtype {name!r} is not supported: use one of {', '.join(dtypes)}")
    return dtypes[name]
