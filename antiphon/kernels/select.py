"""The device and the kernel back-end, chosen once, at start, with the reason.

Whether a GPU can be used is said in one line before anything is loaded. In order: a build of PyTorch with CUDA, a
driver, one that is new enough, a device, the device asked for, one that this build has code for, one that computes in
the wanted dtype. Rejected: to try and to show what PyTorch raises. That comes after minutes of loading, once in every
worker, and names neither what is needed nor what to do.
"""

import os
import re
from typing import Any

import torch

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.kernels.api import KernelBackend
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.kernels.triton import load, why_not

_log = get_logger("kernels")
KERNELS = ("auto", "cpu", "triton", "reference")
NATIVE_DTYPES = (torch.bfloat16, torch.float32)
_cuda: Any = torch.cuda  # its functions have no types
LEAST_BFLOAT16 = (8, 0)  # compute capability from which the tensor cores take it


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


# --- GPUs


def find_gpu(name: str, index: int) -> torch.device:
    """The GPU of worker `index` that `name` ("cuda", "cuda:2") means. `UserError` if there is none, or it cannot be
    used by this PyTorch."""
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UserError(f"--device {name} is not supported: use cpu or cuda")
    _check_driver(name)
    num_devices = torch.cuda.device_count()
    wanted = index % num_devices if match.group(1) is None else int(match.group(1))
    if wanted >= num_devices:
        raise UserError(f"--device {name}: this machine has {num_devices} GPUs, use cuda:0 to cuda:{num_devices - 1}")
    _check_capability(name, wanted)
    return torch.device("cuda", wanted)


def check_gpu_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """`UserError` if the GPU does not compute in that dtype."""
    capability = _capability(device.index or 0)
    if dtype == torch.bfloat16 and capability < LEAST_BFLOAT16:
        raise UserError(
            f"--device {device}: {_named(device.index or 0)} has compute capability {_dotted(capability)} and no "
            f"bfloat16, which needs {_dotted(LEAST_BFLOAT16)}: use --dtype float16"
        )


def _check_driver(name: str) -> None:
    """`UserError` unless PyTorch sees a device."""
    if torch.version.cuda is None:
        raise UserError(
            f"--device {name}: this PyTorch ({torch.__version__}) is a build without CUDA: install one with it (pip "
            "install torch), or use --device cpu"
        )
    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        return
    driver = _driver_version()
    needed = tuple(map(int, torch.version.cuda.split(".")))[:2]
    if driver is None:
        raise UserError(
            f"--device {name}: there is no NVIDIA driver (nvidia-smi shows it): install one for CUDA "
            f"{torch.version.cuda} or later, in a container pass the GPU in, or use --device cpu"
        )
    if driver[0] < needed[0]:  # within a major version older drivers do
        raise UserError(
            f"--device {name}: the driver is for CUDA {_dotted(driver)}, this PyTorch ({torch.__version__}) needs "
            f"{needed[0]}.0: update the driver, or install a PyTorch for CUDA {driver[0]}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
    raise UserError(f"--device {name}: the driver shows no GPU{why}: check nvidia-smi, or use --device cpu")


def _check_capability(name: str, index: int) -> None:
    """`UserError` if this PyTorch has no code for the GPU."""
    capability = _capability(index)
    built = sorted(_architectures(_cuda.get_arch_list()))
    if not built or any(_runs(capability, *each) for each in built):
        return
    versions = ", ".join(dict.fromkeys(_dotted(each) for each, _ in built))
    raise UserError(
        f"--device {name}: {_named(index)} (cuda:{index}) has compute capability {_dotted(capability)}, this PyTorch "
        f"({torch.__version__}) has code for {versions}: use another GPU, or another PyTorch"
    )


def _architectures(names: list[str]) -> list[tuple[tuple[int, int], bool]]:
    """((major, minor), can be translated for later ones) of names such as sm_90a and compute_120."""
    found = (re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]*", name) for name in names)
    return [((int(m.group(2)), int(m.group(3))), m.group(1) == "compute") for m in found if m is not None]


def _runs(capability: tuple[int, int], built: tuple[int, int], is_portable: bool) -> bool:
    return built <= capability and (is_portable or built[0] == capability[0])


def _capability(index: int) -> tuple[int, int]:
    major, minor = _cuda.get_device_capability(index)
    return int(major), int(minor)


def _named(index: int) -> str:
    return str(_cuda.get_device_name(index))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver takes; None without a driver."""
    try:
        number = int(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009  builds without CUDA do not have it
    except (AttributeError, RuntimeError):
        return None
    return (number // 1000, number % 1000 // 10) if number else None
