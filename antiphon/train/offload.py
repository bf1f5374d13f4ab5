"""State of a run in a mapped file, fetched a layer ahead: memory beyond a machine's own (ZeRO-Infinity's idea).

    moments   AdamW's two moments of each parameter. The step goes layer by layer: while one is moved, the file's part
              of the next is read ahead
    experts   the experts' parameters too: forward reads the layer behind it ahead, backward the one before it

A part that is done with is given up (MADV_DONTNEED): its pages go back to the file when the kernel likes, and count no
longer as this process's. So a run holds about two layers of what is mapped, and its numbers are the same bits.

The file has no name once it is open: it ends with its process, however that ends, and a checkpoint is what stays.
Rejected: writing and reading by calls. Every tensor would need a second home, and the kernel reads ahead by itself.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from antiphon.base.errors import ResourceError, why_unwritten
from antiphon.base.units import format_bytes
from antiphon.train.bucket import Piece
from antiphon.train.layer import around
from antiphon.train.model import MoeModel
from antiphon.train.weights import attribute_of

MOMENTS_OF_ADAMW = 2
_PAGE = mmap.ALLOCATIONGRANULARITY
_SMAPS = Path("/proc/self/smaps")


class MappedParts:
    """Memory in a file without a name in `folder`, in parts that are fetched and given up whole. `ResourceError` where
    the folder's disk has no room for `num_bytes`."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise ResourceError(
                f"memory.offload: {folder} cannot be used ({error.strerror}): name another memory.offload_folder"
            ) from error
        if num_bytes > free:
            raise ResourceError(
                f"memory.offload needs {format_bytes(num_bytes)} in {folder}, {format_bytes(free)} are free: make "
                "room, name another memory.offload_folder, or set memory.offload to 'none'"
            )
        self.num_bytes = -(-num_bytes // _PAGE) * _PAGE
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                self._map = mmap.mmap(file.fileno(), self.num_bytes)
                self._inode = os.fstat(file.fileno()).st_ino
        except OSError as error:  # the other ranks of this disk have taken what was free
            raise ResourceError(
                f"memory.offload needs {format_bytes(self.num_bytes)} in {folder} for each rank there, and it has no "
                f"more ({why_unwritten(error.strerror or '')}): make room, or name another memory.offload_folder"
            ) from error
        self._end = 0
        self._parts: dict[int, tuple[int, int]] = {}

    def begin(self, part: int) -> None:
        """What `room` gives from here on belongs to `part`."""
        self._end = -(-self._end // _PAGE) * _PAGE
        self._parts[part] = self._end, 0

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in the last part that was begun."""
        begin, part = self._end, next(reversed(self._parts))
        self._end += numel * dtype.itemsize
        assert self._end <= self.num_bytes, "more is asked for than was announced"
        self._parts[part] = self._parts[part][0], self._end - self._parts[part][0]
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)

    def fetch(self, part: int) -> None:
        """Begin to read a part, if there is one of that number. Does not wait."""
        self._advise(part, mmap.MADV_WILLNEED)

    def give_up(self, part: int) -> None:
        """A part is not needed for now; its numbers stay in the file."""
        self._advise(part, mmap.MADV_DONTNEED)

    def give_up_all(self) -> None:
        """No part is needed for now."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def resident_bytes(self) -> int:
        """What this process has in memory of the parts."""
        held, own = 0, False
        for line in _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines() if _SMAPS.exists() else ():
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                own = len(words) > 4 and words[4] == str(self._inode)
            elif own and words[0] == "Rss:":
                held += int(words[1]) * 1024
        return held

    def _advise(self, part: int, advice: int) -> None:
        begin, size = self._parts.get(part, (0, 0))
        if size:
            self._map.madvise(advice, begin, size)


def layer_of(name: str) -> int:
    """The layer of a parameter; -1: it belongs to none."""
    kind, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if kind == "layers" else -1


def moments_of(pieces: Sequence[Piece], folder: Path) -> MappedParts:
    """Room for the moments of `pieces`, a part a layer; the optimizer takes it in their order."""
    layers = {layer_of(piece.name) for piece in pieces}
    size = sum(MOMENTS_OF_ADAMW * piece.values.numel() * piece.values.element_size() for piece in pieces)
    return MappedParts(folder, size + (len(layers) + 1) * _PAGE)


def map_experts(model: MoeModel, folder: Path) -> MappedParts:
    """Move the parameters of the model's experts into a file; its layers fetch and give up their own."""
    own = {layer.layer: _experts(layer) for layer in model.layers}
    size = sum(each.numel() * each.element_size() for experts in own.values() for each in experts)
    parts = MappedParts(folder, size + (len(own) + 1) * _PAGE)
    numbers = sorted(own)
    for place, number in enumerate(numbers):
        parts.begin(number)
        for each in own[number]:
            each.data = parts.room(each.numel(), each.dtype).view(each.shape).copy_(each.data)
        before, behind = numbers[place - 1] if place else -1, (*numbers[place + 1 :], -1)[0]
        around(
            model.layers[number],
            before=partial(parts.fetch, behind),
            behind=partial(parts.give_up, number),
            before_backward=partial(parts.fetch, before),
            behind_backward=partial(parts.give_up, number),
        )
    for number in numbers:
        parts.give_up(number)
    return parts


def _experts(layer: nn.Module) -> list[nn.Parameter]:
    purposes = ("experts.gate_up", "experts.down")
    found = (getattr(layer, attribute_of(purpose), None) for purpose in purposes)
    return [each for each in found if isinstance(each, nn.Parameter)]
