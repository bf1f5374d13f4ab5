"""Tensors and the memory that the native library sees."""

import ctypes

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """As the native library spells it: `bfloat16`, `float16`, `float32`."""
    return str(dtype).removeprefix("torch.")


def view_of(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on memory of the library's; valid as long as the library says."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in host memory, of this type, without gaps; itself if it is all that. Asking first saves two passes
    through PyTorch's dispatcher, which is cold whenever weights have just passed through the caches."""
    if tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(device="cpu", dtype=dtype).contiguous()
