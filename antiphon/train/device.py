"""The device that a rank computes on, and what follows from it: the one file of training that names devices.

A rank has one GPU, or the CPU. On GPUs a process group has two back-ends: NCCL moves what lies on GPUs, gloo the few
numbers that ranks agree on in host memory (whether to stop, who has written). So no code asks where it runs: a tensor's
own device decides. Rejected: NCCL alone. Every flag would have to be copied to a GPU, and a wait for one could not name
who is missing.
"""

import time
from typing import Literal

import torch
from torch import Tensor

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.kernels.ops.feed_forward import linear

DeviceName = Literal["auto", "cpu", "cuda"]
HOST = torch.device("cpu")
SHAPES_ONLY = torch.device("meta")  # tensors without memory
_PRODUCT_SIZES = {"cpu": 512, "cuda": 8192}
_PRODUCTS = 4


def device_of(name: DeviceName, local_rank: int = 0, ranks_here: int = 1) -> torch.device:
    """The device of rank `local_rank` of the `ranks_here` on this machine; it becomes the current one. "auto": a GPU
    where torch sees any. `UserError` where there is none, or not one for each rank. A process that is to be forked must
    not call it: CUDA does not survive a fork."""
    found = torch.cuda.is_available() if name != "cpu" else False
    if not found:
        if name == "cuda":
            raise UserError("device is 'cuda', torch sees no GPU: set device to 'cpu', or install a build with CUDA")
        return HOST
    if ranks_here > (count := torch.cuda.device_count()):
        raise UserError(
            f"{ranks_here} ranks on this machine share {count} GPUs: start a rank a GPU, or set device to 'cpu'"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backends_of(device: torch.device) -> str:
    """What process groups of ranks with such devices are made of."""
    return "gloo" if device.type == HOST.type else f"{HOST.type}:gloo,{device.type}:nccl"


def free_bytes(device: torch.device) -> int:
    """What this process may take where its tensors lie."""
    if device.type == HOST.type:
        return allowance().memory.left_bytes
    return int(torch.cuda.mem_get_info(device)[0])


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors took on the device so far; None: they lie in the process's own memory."""
    return None if device.type == HOST.type else int(torch.cuda.max_memory_allocated(device))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """`x` from host memory on `device`, without waiting: by way of pinned memory."""
    if device.type == HOST.type or x.device == device:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def host_copy(x: Tensor) -> Tensor:
    """A copy in host memory; from a GPU it is begun, and there after `settle`."""
    if x.device.type == HOST.type:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True).copy_(x, non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given. The CPU has, always."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of a few square matrix products: what a share of the device's speed is measured by. Takes some
    hundredths of a second."""
    size = _PRODUCT_SIZES.get(device.type, 512)
    x = torch.ones(size, size, dtype=dtype, device=device)
    fastest_s = float("inf")
    for multiply in (torch.mm, linear) * _PRODUCTS:
        began_s = time.perf_counter()
        multiply(x, x)
        settle(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return 2.0 * size**3 / fastest_s
