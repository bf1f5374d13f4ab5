"""Chooses the kernel back-end once, at start, and says why."""

import torch

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.gpu import check_gpu_dtype, find_gpu
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.triton import load, why_not

_log = get_logger("kernels")
KERNELS = ("auto", "cpu", "triton", "reference")
NATIVE_DTYPES = (torch.bfloat16, torch.float32)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    """`name` is "auto", "cpu" (native packed kernels), "triton" (for GPUs) or "reference" (plain PyTorch)."""
    check_backend(name, device, dtype)
    if name in ("auto", "cpu") and _native_fits(device, dtype):
        return CpuBackend(dtype)
    reason = why_not(device, dtype)
    if name == "triton" or (name == "auto" and device.type != "cpu" and reason is None):
        made: KernelBackend = load("backend").TritonBackend(device, dtype)
        return made
    if name == "auto":
        _log.info("kernels: reference (no native kernels for %s on %s; of Triton's, %s)", dtype, device, reason)
    return ReferenceBackend(device, dtype)


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """`UserError` if there is no such back-end for this device and dtype. Makes nothing; of a GPU it
    asks the compute capability."""
    if name not in KERNELS:
        raise UserError(f"--kernels {name} do not exist: use {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    if name == "cpu" and not _native_fits(device, dtype):
        kind = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--kernels cpu: the native kernels compute in bfloat16 or float32 on a cpu, not in {kind} on {device}: "
            f"use --kernels reference"
        )
    if name == "triton" and (reason := why_not(device, dtype)) is not None:
        raise UserError(f"--kernels triton: {reason}; or use --kernels reference")
    if device.type == "cuda":
        check_gpu_dtype(device, dtype)


def _native_fits(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in NATIVE_DTYPES


def resolve_device(name: str, index: int) -> torch.device:
    """The device of worker `index` of a machine, whatever its role: "cpu", "cuda" (workers take turns over the GPUs),
    or "cuda:2" for all of them."""
    if name == "cpu":
        return torch.device("cpu")
    return find_gpu(name, index)


def free_memory_bytes(name: str) -> int:
    """Memory free now on the device(s) called `name`: what this process may take, or that of the fullest GPU."""
    if name == "cpu":
        return allowance().memory.left_bytes
    resolve_device(name, 0)
    indices = [torch.device(name).index] if ":" in name else list(range(torch.cuda.device_count()))
    return min(int(torch.cuda.mem_get_info(index)[0]) for index in indices)


def resolve_dtype(name: str) -> torch.dtype:
    """ "bfloat16" and friends, as spelled in `config.json`."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise UserError(f"--dtype {name} is not supported: use one of auto, {', '.join(dtypes)}")
    return dtypes[name]
