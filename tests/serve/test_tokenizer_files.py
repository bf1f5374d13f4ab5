"""Tokenizer files that are missing, damaged, or no files at all: one line that names the file, and nothing blocks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.base.errors import CheckpointError
from antiphon.serve.text.tokenizer_files import load_tokenizer

JSON_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TEMPLATES = ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"]


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Tokenizer and config only, to break."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path)
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put_fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a pipe, not a file: put the file itself there"


def put_folder(path: Path) -> str:
    path.mkdir()
    return "a folder, not a file: put the file itself there"


def put_dangling_link(path: Path) -> str:
    path.symlink_to("blobs/abc")
    return "a link to blobs/abc, which is not there: download it"


def put_nothing(path: Path) -> str:
    path.touch()
    return "empty: download it again"


@pytest.mark.parametrize("put", [put_fifo, put_folder, put_dangling_link, put_nothing])
@pytest.mark.parametrize("name", [*JSON_FILES, *TEMPLATES])
def test_no_file(folder: Path, name: str, put: Callable[[Path], str]) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    expected = put(path)
    assert refusal(folder) == f"{path}: {expected}"


TEXTS: list[tuple[bytes, str]] = [
    (b"[" * 100_000, "not valid JSON (nested too deeply): download it again"),
    (b"{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): "),
    (b'["a"]', "holds a list, not an object: download it again"),
    (b'{"a": "\xff"}', "not valid JSON ('utf-8' codec can't decode byte 0xff in position 7: invalid start byte): "),
    (b'{"model_max_length": NaN}', "not valid JSON (it holds NaN, which is not JSON): download it again"),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.json"])
def test_no_json(folder: Path, name: str, text: bytes, expected: str) -> None:
    (folder / name).write_bytes(text)
    assert refusal(folder).startswith(f"{folder / name}: {expected}")


def test_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    assert refusal(folder) == f"{folder}/chat_template.jinja: not UTF-8 text (invalid start byte): download it again"


def test_an_object_that_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    found = refusal(folder)
    assert found.startswith(f"the tokenizer in {folder} cannot be read: ")
    assert found.endswith(": copy its files from the model's source")


def test_a_whole_tokenizer_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}é")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}é"
