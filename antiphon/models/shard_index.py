"""Which file of a checkpoint folder holds which tensor, and where; how many layers and experts there are. No torch.

`models/checkpoint_folder` says which files those are. An index is a stranger's file: it may name what lies outside the
folder, or is no weights at all, and is refused then.

The header of a `.safetensors` file: 8 bytes little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, then the data. It is checked before anything is believed. It is parsed here because the safetensors
package does not say in one line what is wrong, and planning, which may ask what weights hold, loads no torch.

`config.json` says how much is allocated and how often loops run, so it is held against the weights first
(`models/tensors.check_sizes`). One pass over the names suffices: layers and experts are numbered in them. Layers that
predict further tokens (DeepSeek's multi-token prediction) lie behind the others and do not count.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import (
    MAX_JSON_BYTES,
    SUFFIX,
    WHOLE,
    brief,
    left_over,
    missing_file,
    open_regular,
    read_json,
    weight_files,
)
from antiphon.models.tensor_names import GatedNames, TensorNames
from antiphon.specs.checked import parse_json

LENGTH_BYTES = 8
MAX_AXES = 64  # as many as torch takes
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file, in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names and places of all tensors, checked against the file's size and against each other."""
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes == 0:
            raise CheckpointError(f"{path.name}: empty: download it again")
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or header_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path.name}: not a safetensors file: its first 8 bytes promise a header of {header_bytes:,} bytes, "
                f"the file has {file_bytes:,}: download it again"
            )
        data_start = LENGTH_BYTES + header_bytes
        if data_start > file_bytes:
            raise truncated(path, file_bytes, data_start)
        data = file.read(header_bytes)
    try:
        entries = _entries(parse_json(data, unique_keys=True), data_start)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: damaged safetensors header ({error}): download it again") from error
    needed = max((entry.stop for entry in entries.values()), default=data_start)
    if needed > file_bytes:
        raise truncated(path, file_bytes, needed)
    return entries


def _entries(header: object, data_start: int) -> dict[str, TensorEntry]:
    """`ValueError` if a tensor's place does not fit its shape or lies over another's."""
    if not isinstance(header, dict):
        raise ValueError(f"it holds a {type(header).__name__}, not an object")
    entries = {name: _entry(name, fields, data_start) for name, fields in header.items() if name != "__metadata__"}
    stop, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < stop:
            raise ValueError(f"{brief(name)} lies over {brief(before)}")
        stop, before = entry.stop, name
    return entries


def _entry(name: str, fields: object, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ValueError(f"{brief(name)} is a {type(fields).__name__}, not an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{brief(name)} has dtype {brief(dtype)}, shape {brief(shape)}, offsets {brief(offsets)}")
    start, stop = offsets
    if stop < start:
        raise ValueError(f"{brief(name)} has data_offsets {offsets}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise ValueError(f"{stop - start} bytes for shape {brief(shape)} of {dtype}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """A list of whole numbers from 0; long lists and large numbers are no tensor's."""
    return isinstance(value, list) and len(value) <= MAX_AXES and all(type(n) is int and 0 <= n < 2**63 for n in value)


def truncated(path: Path, file_bytes: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: truncated: {file_bytes:,} bytes, its header promises {needed:,}: download it again"
    )


AGAIN = "download it again"
FURTHER_TOKENS = ("eh_proj.", "nextn.")  # begin tensors, in few bits several, that only a layer for further tokens has
_NUMBER = "([0-9]{1,9})"
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Header = dict[str, TensorEntry]


def file_of_each_tensor(folder: Path) -> tuple[dict[str, str], dict[str, Header]]:
    """Which file holds each tensor, and the headers that had to be read for it: that of a lone file.

    `CheckpointError` if there are no weights, or some are missing or nowhere to be looked for."""
    present = _files_in(folder)
    index, files = weight_files(folder, present)
    if index is not None:
        file_of = _indexed(folder, index, present)
        if file_of is not None:
            return file_of, {}
        files = (WHOLE,)
    headers = {file: read_header(folder / file) for file in files}
    file_of = {}
    for file, header in headers.items():
        if twice := next((name for name in header if name in file_of), None):
            raise CheckpointError(
                f"{folder}: tensor {twice} is in {file_of[twice]} and in {file}: remove the file of another model, or "
                f"download the index"
            )
        file_of |= dict.fromkeys(header, file)
    return file_of, headers


def unused_files(folder: Path, used: Iterable[str]) -> list[str]:
    """Files with other weights that lie beside those `used`."""
    return left_over(_files_in(folder), set(used))


def stored_dtype(folder: Path) -> str | None:
    """The dtype that most bytes of the weights have, scales of smaller ones left out; None if there are none to ask."""
    num_bytes: dict[str, int] = defaultdict(int)
    try:
        file_of, headers = file_of_each_tensor(folder)
        for file in sorted(set(file_of.values())):
            for name, entry in (headers[file] if file in headers else read_header(folder / file)).items():
                if entry.dtype in _FLOATS and "scale" not in name.rpartition(".")[2]:
                    num_bytes[_FLOATS[entry.dtype]] += entry.num_bytes
    except CheckpointError:  # opening the checkpoint says what is wrong
        return None
    return max(num_bytes, key=lambda dtype: num_bytes[dtype], default=None)


def _files_in(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: not a folder: give a folder in Hugging Face format") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}): check its permissions") from error


def _indexed(folder: Path, index: str, present: set[str]) -> dict[str, str] | None:
    """The index, after a look at every file it names: plain names in this folder, and no other kind of file. None if it
    was left over from shards whose place one file took."""
    weight_map = read_json(folder / index, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map = {brief(weight_map)}: an object with names is needed: {AGAIN}")
    if wrong := [file for file in weight_map.values() if not isinstance(file, str)]:
        raise CheckpointError(f"{index}: {brief(wrong[0])} is not the name of a file: {AGAIN}")
    named = sorted(set(weight_map.values()))
    if wrong := [file for file in named if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file]:
        raise CheckpointError(f"{index}: {brief(wrong[0])} is not the name of a file in its folder: {AGAIN}")
    if wrong := [file for file in named if not file.endswith(SUFFIX)]:
        raise CheckpointError(f"{index}: {brief(wrong[0])} is not a {SUFFIX} file: download the weights in that format")
    if WHOLE in present and not present.intersection(named):
        return None
    if missing := [file for file in named if file not in present]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(named)} shards missing, the first is {missing[0]}: "
            f"{missing_file(missing[0], present)}"
        )
    return weight_map


def stored_counts(tensors: Iterable[str], names: TensorNames) -> tuple[frozenset[int], dict[int, int]]:
    """What the names of all stored tensors say: the layers there are, and how many experts a layer has where each has
    tensors of its own."""
    layer_name = re.compile(re.escape(names.layer).replace(re.escape("{layer}"), _NUMBER) + "(.+)")
    prefixes = [layout.prefix for layout in names.experts if isinstance(layout, GatedNames)]
    expert_names = [re.compile(re.escape(prefix).replace(re.escape("{expert}"), _NUMBER)) for prefix in prefixes]
    layers: set[int] = set()
    further: set[int] = set()
    experts: dict[int, set[int]] = defaultdict(set)
    for name in tensors:
        if (found := layer_name.match(name)) is None:
            continue
        layer, rest = int(found[1]), found[2]
        (further if rest.startswith(FURTHER_TOKENS) else layers).add(layer)
        for pattern in expert_names:
            if (expert := pattern.match(rest)) is not None:
                experts[layer].add(int(expert[1]))
    return frozenset(layers - further), {layer: len(found) for layer, found in experts.items()}


def evidence_of(folder: Path, names: TensorNames) -> str:
    """What the weights in `folder` say of the sizes, for an error about config.json; nothing if there are none."""
    try:
        file_of, _ = file_of_each_tensor(folder)
        file = file_of.get(names.embedding)
        embedding = None if file is None else read_header(folder / file).get(names.embedding)
    except CheckpointError:
        return ""
    layers, experts = stored_counts(file_of, names)
    parts = [f"{len(layers)} layers"]
    if experts:
        parts.append(f"{max(experts.values())} experts")
    if embedding is not None and len(embedding.shape) == 2:
        parts += [f"{embedding.shape[0]} tokens", f"a hidden size of {embedding.shape[1]}"]
    return "the weights have " + ", ".join(parts)
