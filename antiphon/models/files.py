"""Opening the files of a checkpoint folder: regular files only, and one line that names the file when it is not one.

A folder may hold anything under the names we look for. A pipe without a writer blocks the opener, a device may
never end, a link may lead nowhere, JSON may nest deeper than the parser can follow.
1. The kind of a file is asked before it is opened; opening never blocks; what was opened is asked once more.
2. No more than a stated number of bytes is read.
3. JSON is strict: no NaN, no infinity, and on demand no key twice.
Rejected: `Path.is_file` before `open`, which says no more than "no" and leaves time to exchange the file.
"""

import errno
import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

from antiphon.base.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000  # as much as the safetensors library takes for a header; published indices have 9 MB
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_BRIEF = reprlib.Repr()
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


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """The value of a JSON text. `ValueError` also for what Python's parser takes or trips over: NaN, infinity, numbers
    too large for a float, texts nested too deeply, and with `unique_keys` a key that an object has twice."""
    try:
        return json.loads(
            data,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique if unique_keys else None,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


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


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key[:200]!r} stands there twice")
        result[key] = value
    return result
