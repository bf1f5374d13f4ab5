"""What lies in a checkpoint's folder, as the hub's tools leave it: which files are the weights, which only lie beside.

Folders come from the hub's cache (snapshots of links), from `git clone`, from ModelScope and from `save_pretrained`.
Next to a model's weights there may be an adapter, another copy in the format of its author, another variant, or what a
download left half done. The first of these that is there counts:
1. the shards that an index names;  2. `model.safetensors`;  3. numbered shards, all of them, whose headers stand in for
an index;  4. the same of a variant (`model.fp16.safetensors`);  5. a lone file of another name.
What is left over is named in the log. Where nothing counts, the error says what is there and what to do with it.
Rejected: taking all files there are. A second copy of the weights is as large, and may be of another model.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import CheckpointError
from antiphon.models.files import read_json

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
_NATIVE = "consolidated"  # Mistral's own names, and Meta's


@dataclass(frozen=True)
class WeightFiles:
    """`index`: the file that says which tensor is where; or else `files`, whose headers say it."""

    index: str | None = None
    files: tuple[str, ...] = ()


def weight_files(folder: Path, present: set[str]) -> WeightFiles:
    """Which of the files in `folder` are its weights. `CheckpointError` if none are, or not all."""
    usable = {name for name in present if name.endswith(SUFFIX) and not _lies_beside(name)}
    if INDEX_NAME in present:
        return WeightFiles(index=INDEX_NAME)
    if WHOLE in usable:
        return WeightFiles(files=(WHOLE,))
    numbered = _numbered(usable)
    indices = sorted(name for name in present if _VARIANT_INDEX.fullmatch(name))
    if indices and not any(stem == "model" for stem, _ in numbered):
        return WeightFiles(index=indices[0])
    if numbered:
        return WeightFiles(files=_all_of(folder, numbered))
    if variants := sorted(name for name in usable if _VARIANT.fullmatch(name)):
        return WeightFiles(files=(variants[0],))
    if len(usable) > 1:
        raise CheckpointError(
            f"{folder}: {len(usable)} {SUFFIX} files but no {INDEX_NAME}: download it from the publisher"
        )
    if not usable:
        raise CheckpointError(f"{folder}: no {SUFFIX} file{_instead(folder, present)}")
    return WeightFiles(files=tuple(usable))


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
        return general
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
