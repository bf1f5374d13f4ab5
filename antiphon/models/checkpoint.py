"""A checkpoint folder in Hugging Face format: one index over one or many `.safetensors` shards.

1. Shards are opened when one of their tensors is first asked for; only headers are read until then.
2. `read` returns a view on the memory map. Whoever copied it calls `release`, so that a loading process never holds
   more than what it keeps and the tensor in hand.
3. A float8 tensor with `<name>_scale_inv` beside it is block-scaled (DeepSeek-V3, section 3.3): it is multiplied out
   here, block row by block row, and comes back as a new tensor.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.models.safetensors_file import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
SCALE_BLOCK = 128

Rows = tuple[int, int] | None


class Checkpoint:
    """Tensors by name. `bytes_read` counts the bytes of every tensor handed out, as stored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0
        self._shards: dict[str, SafetensorsFile] = {}
        self._file_of = _file_of_each_tensor(self.folder, self._shards)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).entries[name].shape

    def stored_bytes(self, name: str, rows: Rows = None) -> int:
        """Bytes that reading the tensor (or its rows) takes from the file, block scales included."""
        shard = self._shard(name)
        scale = self._scale_name(name)
        return shard.num_bytes(name, rows) + (0 if scale is None else self._shard(scale).num_bytes(scale, rows))

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """`CheckpointError` unless the tensor is there and has this shape."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}: "
                f"weights and config.json are of different models, download both again"
            )

    def read(self, name: str, *, dequantize_to: torch.dtype = torch.float32) -> Tensor:
        """The whole tensor: a read-only view, or a new tensor where the stored one is block-scaled float8."""
        return self._read(name, None, dequantize_to)

    def read_slice(self, name: str, start: int, stop: int, *, dequantize_to: torch.dtype = torch.float32) -> Tensor:
        """Rows [start, stop) of the first axis: for a stacked tensor, some of its experts."""
        return self._read(name, (start, stop), dequantize_to)

    def release(self, name: str, rows: Rows = None) -> None:
        """Give the pages of a tensor read before back to the system; views of it stay valid and re-read the file."""
        self._shard(name).release(name, rows)
        if scale := self._scale_name(name):
            self._shard(scale).release(scale, rows)

    def _read(self, name: str, rows: Rows, dequantize_to: torch.dtype) -> Tensor:
        self.bytes_read += self.stored_bytes(name, rows)
        view = self._shard(name).view(name, rows)
        if view.dtype != torch.float8_e4m3fn:
            return view
        scale = self._scale_name(name)
        if scale is None:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor {name} is float8 without {name}{SCALE_SUFFIX}: "
                f"only block-scaled float8 is supported"
            )
        return self._dequantize(name, view, self._shard(scale).view(scale, rows), dequantize_to)

    def _dequantize(self, name: str, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, num_columns = weight.shape[-2:]
        blocks = (-(-num_rows // SCALE_BLOCK), -(-num_columns // SCALE_BLOCK))
        if tuple(scale.shape) != (*weight.shape[:-2], *blocks):
            raise CheckpointError(
                f"{self._file_of[name]}: {name}{SCALE_SUFFIX} has shape {list(scale.shape)}, "
                f"{list(weight.shape)} needs {[*weight.shape[:-2], *blocks]}: "
                f"only blocks of {SCALE_BLOCK} x {SCALE_BLOCK} are supported"
            )
        out = torch.empty(weight.shape, dtype=dtype)
        for block in range(blocks[0]):
            rows = slice(block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, num_rows))
            factors = scale[..., block, :].float().repeat_interleave(SCALE_BLOCK, dim=-1)[..., :num_columns]
            out[..., rows, :] = weight[..., rows, :].float() * factors.unsqueeze(-2)
        return out

    def _scale_name(self, name: str) -> str | None:
        scale = name + SCALE_SUFFIX
        return scale if scale in self._file_of else None

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing: config.json and weights do not belong together, or the "
                f"download is incomplete"
            )
        file_name = self._file_of[name]
        if file_name not in self._shards:
            self._shards[file_name] = SafetensorsFile(self.folder / file_name)
        shard = self._shards[file_name]
        if name not in shard.entries:
            raise CheckpointError(
                f"{file_name}: tensor {name} is missing, though {INDEX_NAME} says it is there: download both again"
            )
        return shard


def _file_of_each_tensor(folder: Path, shards: dict[str, SafetensorsFile]) -> dict[str, str]:
    """Which file holds each tensor. A lone file is opened for it and left in `shards`."""
    index_path = folder / INDEX_NAME
    files = sorted(folder.glob("*.safetensors"))
    if not index_path.exists():
        if not files:
            raise CheckpointError(f"{folder}: no .safetensors file: give a folder in Hugging Face format")
        if len(files) > 1:
            raise CheckpointError(
                f"{folder}: {len(files)} .safetensors files but no {INDEX_NAME}: download it from the publisher"
            )
        shard = shards[files[0].name] = SafetensorsFile(files[0])
        return dict.fromkeys(shard.entries, files[0].name)
    try:
        weight_map = json.loads(index_path.read_text())["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX_NAME}: damaged ({error}): download it again") from error
    present = {path.name for path in files}
    if missing := sorted(set(file_of.values()) - present):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(set(file_of.values()))} shards missing, the first is {missing[0]}: "
            f"download it"
        )
    return file_of
