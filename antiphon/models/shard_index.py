"""Which `.safetensors` file of a checkpoint folder holds which tensor: from the index, or from a lone file. No torch.

The index is a stranger's file: it may name what lies outside the folder, or is no weights at all, and is refused then.
"""

from pathlib import Path

from antiphon.base.errors import CheckpointError
from antiphon.models.files import brief, read_json
from antiphon.models.safetensors_header import TensorEntry, read_header

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
AGAIN = "download it again"
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
