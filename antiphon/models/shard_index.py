"""Which file of a checkpoint folder holds which tensor, and how many layers and experts their names tell of. No torch.

The files are named by an index, unless there is a lone one. The index is a stranger's file: it may name what lies
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
from antiphon.models.files import brief, read_json
from antiphon.models.names import PerExpertLayout, TensorNames
from antiphon.models.safetensors_header import TensorEntry, read_header

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
AGAIN = "download it again"
FURTHER_TOKENS = "eh_proj.weight"  # a tensor that only a layer for further tokens has
_NUMBER = "([0-9]{1,9})"
Header = dict[str, TensorEntry]


def file_of_each_tensor(folder: Path) -> tuple[dict[str, str], dict[str, Header]]:
    """Which file holds each tensor, and the headers that had to be read for it: that of a lone file.

    `CheckpointError` if there are no weights, or some are missing or nowhere to be looked for."""
    present = _files_in(folder)
    if INDEX_NAME in present:
        return _indexed(folder, present), {}
    files = sorted(name for name in present if name.endswith(SUFFIX))
    if not files:
        raise CheckpointError(f"{folder}: no {SUFFIX} file: give a folder in Hugging Face format")
    if len(files) > 1:
        raise CheckpointError(
            f"{folder}: {len(files)} {SUFFIX} files but no {INDEX_NAME}: download it from the publisher"
        )
    header = read_header(folder / files[0])
    return dict.fromkeys(header, files[0]), {files[0]: header}


def _files_in(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: not a folder: give a folder in Hugging Face format") from error
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}): check its permissions") from error


def _indexed(folder: Path, present: set[str]) -> dict[str, str]:
    """The index, after a look at every file it names: plain names in this folder, and no other kind of file."""
    weight_map = read_json(folder / INDEX_NAME, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{INDEX_NAME}: weight_map = {brief(weight_map)}: an object with names is needed: {AGAIN}"
        )
    if wrong := [file for file in weight_map.values() if not isinstance(file, str)]:
        raise CheckpointError(f"{INDEX_NAME}: {brief(wrong[0])} is not the name of a file: {AGAIN}")
    named = sorted(set(weight_map.values()))
    if wrong := [file for file in named if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file]:
        raise CheckpointError(f"{INDEX_NAME}: {brief(wrong[0])} is not the name of a file in its folder: {AGAIN}")
    if wrong := [file for file in named if not file.endswith(SUFFIX)]:
        raise CheckpointError(
            f"{INDEX_NAME}: {brief(wrong[0])} is not a {SUFFIX} file: download the weights in that format"
        )
    if missing := [file for file in named if file not in present]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(named)} shards missing, the first is {missing[0]}: download it"
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
