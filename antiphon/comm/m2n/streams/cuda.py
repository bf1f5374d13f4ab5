"""Streams of a CUDA device for stream-ordered sends and receives. Written from documentation; not yet run on a GPU.

Events are PyTorch's. Flags are words of a page of host memory that is registered with the driver, so that both see it:
`cuStreamWaitValue32` stops the stream until the word has reached a value (a cyclic comparison of signed 32 bits).
Stages are pinned memory. `cuda-python` reaches the driver; PyTorch has no call for it.

Order of memory. To a device: the core's thread writes a stage, then the flag with a release store; the copy engine
reads the stage only after the wait has seen the flag, and memory of the host is coherent. From a device: the copy into
a stage precedes an event, and an event that is done has made it visible to the host. So no flush is needed, as no peer
writes into memory of the device. A transport that did (libfabric's `FI_HMEM`) would need `cuFlushGPUDirectRDMAWrites`
between the arrival and the flag, wherever the attribute GPU_DIRECT_RDMA_WRITES_ORDERING of the device is NONE.

Hazards. The driver does not know of the order that flags make. Work that must not wait for a flag belongs on another
stream, and nothing that raises a flag may depend on the device: the core never calls it but to query events. Calls
that synchronize with the whole device (freeing memory, a first launch that loads a module) may block the caller while
a stream waits; PyTorch and cuda-python release the interpreter's lock there, so the core goes on and the flag comes.

Rejected: a kernel that spins on the flag (it takes a multiprocessor from the computation), and memory from
`cuMemHostAlloc` (threads of the host may not be able to sleep on words in it: it is a mapping of the driver's).
"""

import atexit
import importlib
from typing import Any, Self

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.m2n.streams.stream import FlagPage, FlagWord, Ready

_cuda: Any = torch.cuda  # its classes have no types


def load_driver() -> Any:
    """`cuda.bindings.driver`. `UserError` with the fix when it, or a device, is missing."""
    if not torch.cuda.is_available():
        kind = "sees no CUDA device" if torch.version.cuda else "is a build without CUDA"
        raise UserError(f"streams of a GPU: PyTorch {torch.__version__} {kind}: check nvidia-smi, or use HostStream")
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UserError(f"streams of a GPU need cuda-python ({error}): pip install 'cuda-python>=12.6'") from None


class _CudaReady:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class CudaStream:
    """`Stream` on a CUDA stream, by default a new one of the current device; a context manager.

    Its pages of flags are known to the driver until `close`, or until the process ends: a wait that lies on the stream
    may read them at any time.
    """

    def __init__(self, name: str = "stream", stream: Any = None) -> None:
        """`stream`: a `torch.cuda.Stream`. `UserError` when a device or cuda-python is missing."""
        self._driver = load_driver()
        self._name = name
        self.stream = stream if stream is not None else _cuda.Stream()
        self._pages: list[FlagPage] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._name

    def record(self) -> Ready:
        event = _cuda.Event()
        event.record(self.stream)
        return _CudaReady(event)

    def wait_flag(self, flag: FlagWord, value: int) -> None:
        assert flag.device_address, "a flag of another kind of stream"
        geq = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        handle = self._driver.CUstream(self.stream.cuda_stream)
        self._call("cuStreamWaitValue32", handle, flag.device_address, value & 0xFFFFFFFF, geq)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)  # else it could be freed, and given out again, before the copy

    def new_flag(self) -> FlagWord:
        if not self._pages or self._pages[-1].full:
            self._register(FlagPage())
        return self._pages[-1].new_flag()

    def new_stage(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        """Wait for everything on the stream. Without a limit: the core's deadlines bound every wait for a flag."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for what is on the stream, then let go of the flags. Close the core first: it raises them all."""
        self.synchronize()
        for page in self._pages:
            self._call("cuMemHostUnregister", page.address)
        self._pages.clear()
        atexit.unregister(self._pages.clear)

    def _register(self, page: FlagPage) -> None:
        flags = int(self._driver.CU_MEMHOSTREGISTER_PORTABLE) | int(self._driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        self._call("cuMemHostRegister", page.address, page.num_bytes, flags)
        if not self._pages:
            atexit.register(self._pages.clear)  # keeps them mapped if the stream is dropped without `close`
        self._pages.append(page)
        page.device_address = int(self._call("cuMemHostGetDevicePointer", page.address, 0))

    def _call(self, name: str, *arguments: object) -> Any:
        """One call of the driver on the stream's device; what it returned beside its status."""
        with torch.cuda.device(self.stream.device):
            self.stream.query()  # PyTorch's runtime makes the device's context this thread's; the driver needs one
            status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            shown = ", ".join(str(argument) for argument in arguments)
            raise OSError(f"{self._name}: {name}({shown}) failed: {getattr(status, 'name', status)}")
        return values[0] if values else None
