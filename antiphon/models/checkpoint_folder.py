"""What lies in a checkpoint's folder, as the hub's tools leave it: which files are the weights, which only lie beside.

Folders come from the hub's cache (snapshots of links), from `git clone`, from ModelScope and from `save_pretrained`.
Next to a model's weights there may be an adapter, another copy in the format of its author, another variant, or what a
download left half done. The first of these that is there counts:
1. the shards that an index names;  2. `model.safetensors`;  3. numbered shards, all of them, whose headers stand in for
an index;  4. the same of a variant (`model.fp16.safetensors`);  5. a lone file of another name.
What is left over is named in the log. Where nothing counts, the error says what is there and what to do with it.
Rejected: taking all files there are. A second copy of the weights is as large, and may be of another model.

Files are opened as regular files only, and one line names the file when it is not one. A folder may hold anything under
the names we look for: a pipe without a writer blocks the opener, a device may never end, a link may lead nowhere, JSON
may nest deeper than the parser can follow.
1. The kind of a file is asked before it is opened; opening never blocks; what was opened is asked once more.
2. No more than a stated number of bytes is read.
3. JSON is strict: no NaN, no infinity, and on demand no key twice.
Rejected: `Path.is_file` before `open`, which says no more than "no" and leaves time to exchange the file.
"""

import errno
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

from antiphon.base.errors import CheckpointError
from antiphon.specs.catalog import refuse_another
from antiphon.specs.checked import parse_json

MAX_JSON_BYTES = 100_000_000  # as much as the safetensors library takes for a header; published indices have 9 MB
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class _Brief(reprlib.Repr):
    """With JSON's own words for what Python calls True, False and None."""

    def repr_bool(self, value: bool, _level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, _value: None, _level: int) -> str:
        return "null"


_BRIEF = _Brief()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def brief(value: object) -> str:
    """A value from a file for people to read, however long it is."""
    return _BRIEF.repr(value)


def open_regular(path: Path, missing: str = "download it") -> BinaryIO:
    """The file opened for reading; never blocks. `missing`: what to do where there is none.

    `CheckpointError` if it is not there, not a regular file, or may not be read."""
    try:
        _check_kind(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that no system accepts
        raise _cannot_be_read(path, error, missing) from error
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status)
        if status.st_size <= _POINTER_BYTES and os.pread(descriptor, len(_POINTER), 0) == _POINTER:
            raise CheckpointError(f"{path}: a pointer of Git LFS, not the file: run git lfs pull in {path.parent}")
    except CheckpointError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path) -> int:
    """The file's size in bytes. `CheckpointError` if it cannot be opened as a regular file, or is empty."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise CheckpointError(f"{path}: empty: download it again")
    return size


def read_json(path: Path, missing: str = "download it", *, unique_keys: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds. `CheckpointError` for whatever is wrong with the file or its text."""
    with open_regular(path, missing) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_JSON_BYTES:,} bytes of JSON: download it again")
    try:
        value = parse_json(data, unique_keys=unique_keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object: download it again")
    return value


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path}: {kind}, not a file: put the file itself there")


def _cannot_be_read(path: Path, error: OSError | ValueError, missing: str) -> CheckpointError:
    if not isinstance(error, OSError):
        return CheckpointError(f"{str(path)!r}: cannot be read ({error}): give another path")
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{path}: a link that leads back to itself: put the file itself there")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if path.is_symlink():
            return CheckpointError(f"{path}: a link to {path.readlink()}, which is not there: {missing}")
        return CheckpointError(f"{path} is missing: {missing}")
    return CheckpointError(f"{path}: cannot be read ({error.strerror}): check its permissions and its disk")


SUFFIX = ".safetensors"
WHOLE = "model" + SUFFIX
INDEX_NAME = WHOLE + ".index.json"
_VARIANT_INDEX = re.compile(r"model\.safetensors\.index\.[\w-]+\.json|model\.[\w-]+\.safetensors\.index\.json")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})(?P<variant>(\.[\w-]+)?)\.safetensors")
_VARIANT = re.compile(r"model\.[\w-]+\.safetensors")
_OTHER_FORMATS = re.compile(
    r"(pytorch_model|model|consolidated|adapter_model|tf_model|flax_model)([.-].*)?\.(bin|pt|h5|msgpack|onnx)"
    r"|.*\.(pth|ckpt|gguf|nemo)"
)
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_NATIVE = "consolidated"  # Mistral's own names, and Meta's


def weight_files(folder: Path, present: set[str]) -> tuple[str | None, tuple[str, ...]]:
    """Which of the files in `folder` are its weights: (the index that says which tensor is where, or None; without an
    index, the files whose headers say it). `CheckpointError` if none are, or not all."""
    usable = {name for name in present if name.endswith(SUFFIX) and not _lies_beside(name)}
    if INDEX_NAME in present:
        return INDEX_NAME, ()
    if WHOLE in usable:
        return None, (WHOLE,)
    numbered = _numbered(usable)
    indices = sorted(name for name in present if _VARIANT_INDEX.fullmatch(name))
    if indices and not any(stem == "model" for stem, _ in numbered):
        return indices[0], ()
    if numbered:
        return None, _all_of(folder, numbered)
    if variants := sorted(name for name in usable if _VARIANT.fullmatch(name)):
        return None, (variants[0],)
    if len(usable) > 1:
        raise CheckpointError(
            f"{folder}: {len(usable)} {SUFFIX} files but no {INDEX_NAME}: download it from the publisher"
        )
    if not usable:
        raise CheckpointError(f"{folder}: no {SUFFIX} file{_instead(folder, present)}")
    return None, tuple(usable)


def left_over(present: set[str], used: set[str]) -> list[str]:
    """Files with weights that are not among those `used`."""
    return sorted(
        name
        for name in present - used
        if not name.startswith(".") and (name.endswith(SUFFIX) or _OTHER_FORMATS.fullmatch(name))
    )


def missing_file(name: str, present: set[str]) -> str:
    """What to do about a file that is not there."""
    other = next((each for each in sorted(present) if each.lower() == name.lower()), None)
    return "download it" if other is None else f"rename {other}"


def model_folder(path: Path) -> Path:
    """The snapshot in a model's folder of the hub's cache; any other path as it is.

    `CheckpointError` where it is not clear which of several snapshots is meant, or there is none."""
    snapshots = path / "snapshots"
    try:
        if (path / "config.json").exists() or not snapshots.is_dir():
            return path
        found = sorted(each for each in snapshots.iterdir() if each.is_dir())
        main = path / "refs" / "main"
        wanted = main.read_text().strip() if main.is_file() else ""
    except (OSError, ValueError):  # reading config.json says what is wrong
        return path
    if chosen := [each for each in found if each.name == wanted] or (found if len(found) == 1 else []):
        return chosen[0]
    if not found:
        raise CheckpointError(f"{path}: no snapshot of the model is there: download it again")
    raise CheckpointError(f"{path}: {len(found)} snapshots and no refs/main that names one: give {found[-1]}")


def weights_folder(path: Path) -> Path:
    """`model_folder` for what needs weights. `CheckpointError` for a `config.json`, which is enough for a plan."""
    if path.suffix == ".json" and path.is_file():
        refuse_another("model", path)
        raise CheckpointError(f"{path} is one file of a checkpoint: give the folder {path.parent}")
    return model_folder(path)


def model_name(path: Path) -> str:
    """The name of a folder or GGUF file, or that of the model whose snapshot it is."""
    resolved = path.resolve()
    cached = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.rpartition("--")[2]
    return resolved.stem if resolved.suffix == ".gguf" else resolved.name


def instead_of_config(folder: Path) -> str:
    """What to do about a folder without `config.json`, by what else is there."""
    general = "give a checkpoint folder in Hugging Face format"
    try:
        present = {each.name for each in folder.iterdir()}
    except OSError:
        return general + _from_hub(folder)
    if "adapter_config.json" in present:
        return _merge(folder)
    if (advice := missing_file("config.json", present)) != "download it":
        return advice
    if models := sorted(name for name in present if name.startswith("models--")):
        return f"this is a cache of {len(models)} models, give one of them, for example {folder / models[0]}"
    if "params.json" in present or any(name.startswith(_NATIVE) for name in present):
        return "the weights are in their author's own format, download config.json and model*.safetensors"
    inner = sorted(name for name in present if (folder / name / "config.json").is_file())
    return f"give {folder / inner[0]}" if inner else general


def _from_hub(path: Path) -> str:
    """The end of a sentence about a path that is not there and may be a model's name on the Hugging Face Hub."""
    if len(path.parts) != 2 or not _HUB_NAME.fullmatch(str(path)) or path.parent.exists():
        return ""
    return f"; if {path} is its name on the Hugging Face Hub: hf download {path} --local-dir {path.name}"


def _lies_beside(name: str) -> bool:
    return name.startswith((".", "adapter_", _NATIVE, "training_"))


def _numbered(names: set[str]) -> dict[tuple[str, int], dict[int, str]]:
    """Shards by (stem with variant, how many there are), then by number."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        if (found := _NUMBERED.fullmatch(name)) is not None:
            key = found["stem"] + found["variant"], int(found["total"])
            groups.setdefault(key, {})[int(found["number"])] = name
    return groups


def _all_of(folder: Path, groups: dict[tuple[str, int], dict[int, str]]) -> tuple[str, ...]:
    if len(groups) > 1:
        groups = {key: group for key, group in groups.items() if key[0] == "model"} or groups
    if len(groups) > 1:
        raise CheckpointError(
            f"{folder}: shards of {len(groups)} models and no {INDEX_NAME}: download it from the publisher"
        )
    [((stem, total), shards)] = groups.items()
    first = 0 if 0 in shards else 1
    if missing := [number for number in range(first, first + total) if number not in shards]:
        name = f"{stem}-{missing[0]:05}-of-{total:05}{SUFFIX}"
        raise CheckpointError(f"{folder}: {len(missing)} of {total} shards missing, the first is {name}: download it")
    return tuple(shards.values())


def _instead(folder: Path, present: set[str]) -> str:
    """The end of a sentence about a folder that has no weights for us."""
    if any(name.startswith(_NATIVE) and name.endswith((SUFFIX, ".pth")) for name in present):
        return f", only weights in their author's own format ({_NATIVE}*): download model*{SUFFIX} of the same model"
    if any(name.startswith("adapter_") for name in present):
        return f", only an adapter: {_merge(folder)}"
    if other := sorted(name for name in present if _OTHER_FORMATS.fullmatch(name)):
        return f", only {other[0]}: download the weights as {SUFFIX}, or save them with transformers' save_pretrained"
    if any(name.endswith(".incomplete") for name in present) or (folder / "._____temp").is_dir():
        return ": the download did not end, repeat it"
    return ": give a folder in Hugging Face format"


def _merge(folder: Path) -> str:
    try:
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    except CheckpointError:
        base = None
    name = f" ({base[:100]})" if isinstance(base, str) else ""
    return f"merge the adapter into its model{name} and give that folder"
