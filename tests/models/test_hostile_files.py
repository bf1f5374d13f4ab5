"""What stands in a checkpoint folder instead of a file, and files whose content is made to mislead: one line each.

Nothing may block, follow a name out of the folder, or end in another exception than `CheckpointError`.
"""

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.checkpoint_folder import MAX_JSON_BYTES, open_regular, read_json
from antiphon.models.config import load_model_spec
from tests.models.test_config_values import MIXTRAL

INDEX = "model.safetensors.index.json"


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because a socket's name may have 107 characters; and one that other users may enter."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        (path / "config.json").write_text(json.dumps(MIXTRAL))
        save_file({"a": torch.ones(2, 3)}, path / "model.safetensors")
        yield path


def put_fifo(path: Path) -> str:
    os.mkfifo(path)
    return f"{path}: a pipe, not a file: put the file itself there"


def put_folder(path: Path) -> str:
    path.mkdir()
    return f"{path}: a folder, not a file: put the file itself there"


def put_socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return f"{path}: a socket, not a file: put the file itself there"


def put_link_to_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return f"{path}: a device, not a file: put the file itself there"


def put_dangling_link(path: Path) -> str:
    path.symlink_to("blobs/abc")
    return f"{path}: a link to blobs/abc, which is not there: "


def put_looping_link(path: Path) -> str:
    path.symlink_to(path.name)
    return f"{path}: a link that leads back to itself: put the file itself there"


KINDS = [put_fifo, put_folder, put_socket, put_link_to_device, put_dangling_link, put_looping_link]


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "model.safetensors"])
def test_no_file(folder: Path, name: str, put: Callable[[Path], str]) -> None:
    (folder / name).unlink(missing_ok=True)
    expected = put(folder / name)
    found = message_of(lambda: (load_model_spec(folder), Checkpoint(folder)))
    assert found.startswith(expected)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "model.safetensors"])
def test_no_permission(folder: Path, name: str) -> None:
    (folder / name).touch()
    (folder / name).chmod(0)
    expected = f"{folder / name}: cannot be read (Permission denied): check its permissions and its disk"
    assert as_nobody(lambda: message_of(lambda: (load_model_spec(folder), Checkpoint(folder)))) == expected


def test_no_permission_for_the_folder(folder: Path) -> None:
    folder.chmod(0)
    try:
        assert as_nobody(lambda: message_of(lambda: Checkpoint(folder))) == (
            f"{folder}: cannot be read (Permission denied): check its permissions"
        )
        assert as_nobody(lambda: message_of(lambda: load_model_spec(folder))).startswith(
            f"{folder}/config.json: cannot be read (Permission denied)"
        )
    finally:
        folder.chmod(0o755)


def as_nobody(action: Callable[[], str]) -> str:
    """The superuser may read anything: run as a user who may not."""
    if os.geteuid() != 0:
        return action()
    os.seteuid(65534)
    try:
        return action()
    finally:
        os.seteuid(0)


def test_a_path_no_system_takes(tmp_path: Path) -> None:
    assert "File name too long" in message_of(lambda: load_model_spec(tmp_path / ("x" * 300)))
    assert "null" in message_of(lambda: open_regular(tmp_path / "a\0b"))


TEXTS: list[tuple[bytes, str]] = [
    (b"", "not valid JSON (Expecting value: line 1 column 1 (char 0)): download it again"),
    (b"[" * 100_000, "not valid JSON (nested too deeply): download it again"),
    (b'{"a":' * 100_000, "not valid JSON (nested too deeply): download it again"),
    (b"[1]", "holds a list, not an object: download it again"),
    (b"null", "holds a NoneType, not an object: download it again"),
    (b'{"a": NaN}', "not valid JSON (it holds NaN, which is not JSON): download it again"),
    (b'{"a": -Infinity}', "not valid JSON (it holds -Infinity, which is not JSON): download it again"),
    (b'{"a": 1e999}', "not valid JSON (the number 1e999 is too large): download it again"),
    (b'{"a": "\xff"}', "not valid JSON ('utf-8' codec can't decode byte 0xff in position 7: invalid start byte)"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit (4300 digits) for integer string conversion"),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_no_json(folder: Path, name: str, text: bytes, expected: str) -> None:
    (folder / name).write_bytes(text)
    found = message_of(lambda: (load_model_spec(folder), Checkpoint(folder)))
    assert found.startswith(f"{folder / name}: {expected}")


def test_more_json_than_is_read(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # a hole: it takes no space
    assert message_of(lambda: read_json(folder / "config.json")) == (
        f"{folder}/config.json: more than 100,000,000 bytes of JSON: download it again"
    )


INDICES: list[tuple[str, str]] = [
    ('{"weight_map": ["a"]}', "weight_map = ['a']: an object with names is needed: download it again"),
    ('{"weight_map": {}}', "weight_map = {}: an object with names is needed: download it again"),
    ('{"weight_map": {"a": 1}}', "1 is not the name of a file: download it again"),
    ('{"weight_map": {"a": "../x"}}', "'../x' is not the name of a file in its folder: download it again"),
    ('{"weight_map": {"a": "/etc/x"}}', "'/etc/x' is not the name of a file in its folder: download it again"),
    ('{"weight_map": {"a": ".."}}', "'..' is not the name of a file in its folder: download it again"),
    (
        '{"weight_map": {"a": "config.json"}}',
        "'config.json' is not a .safetensors file: download the weights in that format",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), INDICES)
def test_index_that_names_no_shards(folder: Path, text: str, expected: str) -> None:
    (folder / INDEX).write_text(text)
    assert message_of(lambda: Checkpoint(folder)) == f"{INDEX}: {expected}"


def test_index_with_a_tensor_twice(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}')
    assert message_of(lambda: Checkpoint(folder)) == (
        f"{folder / INDEX}: not valid JSON ('a' stands there twice): download it again"
    )


def test_a_shard_that_is_no_checkpoint_is_not_called_missing(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    (folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 100)
    promised = int.from_bytes(b"\x80\x02}q\x00.\x80\x02", "little")
    assert message_of(Checkpoint(folder).open_shards) == (
        f"model.safetensors: not a safetensors file: its first 8 bytes promise a header of {promised:,} bytes, "
        f"the file has 600: download it again"
    )


def f32(shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


HEADERS: list[tuple[Any, str]] = [
    ([], "it holds a list, not an object"),
    ({"a": 1}, "'a' is a int, not an object"),
    ({"a": {}}, "'a' has dtype null, shape null, offsets null"),
    ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, "'b' lies over 'a'"),
    ({"a": f32([2], 0, 8), "b": f32([2], 0, 8)}, "'b' lies over 'a'"),
    ({"a": f32([-2, -1], 0, 8)}, "'a' has dtype 'F32', shape [-2, -1], offsets [0, 8]"),
    ({"a": f32([2.0], 0, 8)}, "'a' has dtype 'F32', shape [2.0], offsets [0, 8]"),
    ({"a": f32([True], 0, 4)}, "'a' has dtype 'F32', shape [true], offsets [0, 4]"),
    ({"a": f32([2], -8, 0)}, "'a' has dtype 'F32', shape [2], offsets [-8, 0]"),
    ({"a": f32([2], 8, 0)}, "'a' has data_offsets [8, 0]"),
    ({"a": f32([2], 0, 8) | {"data_offsets": [0]}}, "'a' has dtype 'F32', shape [2], offsets [0]"),
    ({"a": f32([3], 0, 8)}, "8 bytes for shape [3] of F32"),
    ({"a": f32([2**62, 2**62], 0, 8)}, f"8 bytes for shape [{2**62}, {2**62}] of F32"),
    ({"a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 8]}}, "8 bytes for shape [3] of I8"),
    ({"a": f32([1] * 65, 0, 4)}, "'a' has dtype 'F32', shape [1, 1, 1, 1, 1, 1, ...], offsets [0, 4]"),
    ({"a": f32([2], 0, 8) | {"dtype": ["F32"]}}, "'a' has dtype ['F32'], shape [2], offsets [0, 8]"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "expected"), HEADERS)
def test_header_that_misleads(folder: Path, header: Any, expected: str) -> None:
    write_shard(folder, json.dumps(header).encode())
    assert message_of(lambda: Checkpoint(folder)) == (
        f"model.safetensors: damaged safetensors header ({expected}): download it again"
    )


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"{" + b'"a":{' * 50_000, "nested too deeply"),
        (b"\xff{}", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', "'a' stands there twice"),
    ],
)
def test_header_that_is_no_json(folder: Path, header: bytes, expected: str) -> None:
    write_shard(folder, header)
    assert message_of(lambda: Checkpoint(folder)) == (
        f"model.safetensors: damaged safetensors header ({expected}): download it again"
    )


@pytest.mark.parametrize("promised", [10**8 + 1, 2**63, 2**64 - 1])
def test_header_that_promises_too_much(folder: Path, promised: int) -> None:
    (folder / "model.safetensors").write_bytes(promised.to_bytes(8, "little") + b"{}")
    assert message_of(lambda: Checkpoint(folder)) == (
        f"model.safetensors: not a safetensors file: its first 8 bytes promise a header of {promised:,} bytes, "
        f"the file has 10: download it again"
    )


def test_offsets_beyond_the_file(folder: Path) -> None:
    header = json.dumps({"a": f32([10**9], 0, 4 * 10**9)}).encode()
    write_shard(folder, header)
    size, promised = 8 + len(header) + 16, 8 + len(header) + 4 * 10**9
    assert message_of(lambda: Checkpoint(folder)) == (
        f"model.safetensors: truncated: {size:,} bytes, its header promises {promised:,}: download it again"
    )


def test_a_shard_that_shrinks_after_its_header_was_read(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(size - 8)
    assert message_of(lambda: checkpoint.read("a")) == (
        f"model.safetensors: truncated: {size - 8:,} bytes, its header promises {size:,}: download it again"
    )


def write_shard(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
