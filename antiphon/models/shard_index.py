"""Which file of a checkpoint folder holds which tensor, and how many layers and experts their names tell of. No torch.

Which files those are, `models/checkpoint_folder` says. An index is a stranger's file: it may name what lies
outside the folder, or is no weights at all, and is refused then.

`config.json` says how much is allocated and how often loops run, so it is held against the weights first
(`models/tensors.check_sizes`). One pass over the names suffices: layers and experts are numbered in them. Layers that
predict further tokens (DeepSeek's multi-token prediction) lie behind the others and do not count.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import SUFFIX, WHOLE, left_over, missing_file, weight_files
from antiphon.models.files import brief, read_json
from antiphon.models.names import PerExpertLayout, TensorNames
from antiphon.models.safetensors_header import TensorEntry, read_header

AGAIN = "download it again"
FURTHER_TOKENS = "eh_proj.weight"  # a tensor that only a layer for further tokens has
_NUMBER = "([0-9]{1,9})"
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Header = dict[str, TensorEntry]


def file_of_each_tensor(folder: Path) -> tuple[dict[str, str], dict[str, Header]]:
    """Which file holds each tensor, and the headers that had to be read for it: that of a lone file.

    `CheckpointError` if there are no weights, or some are missing or nowhere to be looked for."""
    present = _files_in(folder)
    weights = weight_files(folder, present)
    files = weights.files
    if weights.index is not None:
        file_of = _indexed(folder, weights.index, present)
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


@dataclass(frozen=True)
class StoredCounts:
    """The layers there are, and how many experts a layer has where each has tensors of its own."""

    layers: frozenset[int]
    experts: dict[int, int]


def stored_counts(tensors: Iterable[str], names: TensorNames) -> StoredCounts:
    """What the names of all stored tensors say."""
    layer_name = re.compile(re.escape(names.layer).replace(re.escape("{layer}"), _NUMBER) + "(.+)")
    prefixes = [layout.names.prefix for layout in names.experts if isinstance(layout, PerExpertLayout)]
    expert_names = [re.compile(re.escape(prefix).replace(re.escape("{expert}"), _NUMBER)) for prefix in prefixes]
    layers: set[int] = set()
    further: set[int] = set()
    experts: dict[int, set[int]] = defaultdict(set)
    for name in tensors:
        if (found := layer_name.match(name)) is None:
            continue
        layer, rest = int(found[1]), found[2]
        (further if rest == FURTHER_TOKENS else layers).add(layer)
        for pattern in expert_names:
            if (expert := pattern.match(rest)) is not None:
                experts[layer].add(int(expert[1]))
    return StoredCounts(frozenset(layers - further), {layer: len(found) for layer, found in experts.items()})


def evidence_of(folder: Path, names: TensorNames) -> str:
    """What the weights in `folder` say of the sizes, for an error about config.json; nothing if there are none."""
    try:
        file_of, _ = file_of_each_tensor(folder)
        file = file_of.get(names.embedding)
        embedding = None if file is None else read_header(folder / file).get(names.embedding)
    except CheckpointError:
        return ""
    stored = stored_counts(file_of, names)
    parts = [f"{len(stored.layers)} layers"]
    if stored.experts:
        parts.append(f"{max(stored.experts.values())} experts")
    if embedding is not None and len(embedding.shape) == 2:
        parts += [f"{embedding.shape[0]} tokens", f"a hidden size of {embedding.shape[1]}"]
    return "the weights have " + ", ".join(parts)
