"""Chooses the kernel back-end once, at start, and says why."""

import re

import torch

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend

_log = get_logger("kernels")
NATIVE_DTYPES = (torch.bfloat16, torch.float32)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
    """`name` is "auto", "cpu" (native packed kernels) or "reference" (plain PyTorch)."""
    check_backend(name, device, dtype)
    if _native_fits(device, dtype) and name != "reference":
        return CpuBackend(dtype)
    if name == "auto":
        _log.info("kernels: reference (no native kernels for %s on %s)", dtype, device)
    return ReferenceBackend(device, dtype)


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """`UserError` if there is no such back-end for this device and dtype. Makes nothing, touches no device."""
    if name not in ("auto", "cpu", "reference"):
        raise UserError(f"--kernels {name} do not exist: use auto, cpu or reference")
    if name == "cpu" and not _native_fits(device, dtype):
        kind = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--kernels cpu: the native kernels compute in bfloat16 or float32 on a cpu, not in {kind} on {device}: "
            f"use --kernels reference"
        )


def _native_fits(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in NATIVE_DTYPES


def resolve_device(name: str, index: int) -> torch.device:
    """The device of worker `index` of a machine, whatever its role: "cpu", "cuda" (workers take turns over the GPUs),
    or "cuda:2" for all of them."""
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UserError(f"--device {name} is not supported: use cpu or cuda")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch sees no CUDA device; use --device cpu or install a CUDA build")
    num_devices = torch.cuda.device_count()
    wanted = index % num_devices if match.group(1) is None else int(match.group(1))
    if wanted >= num_devices:
        raise UserError(f"--device {name}: this machine has {num_devices} GPUs, use cuda:0 to cuda:{num_devices - 1}")
    return torch.device("cuda", wanted)


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
