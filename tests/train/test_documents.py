"""Which files patterns name, and what is read of them."""

import gzip
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.train.config_tables import DataConfig
from antiphon.train.documents import find_files, read_documents


def texts(file: Path) -> list[str]:
    return [document.text for document in read_documents(file, "text")]


def test_lines_by_other_names_with_nulls_and_a_mark_of_byte_order(tmp_path: Path) -> None:
    """As JSON they were a text of their own, braces and all."""
    lines = b'\xef\xbb\xbf{"text": "one"}\n{"text": null}\n{"text": "two"}\n'
    for name in ("a.jsonl", "a.ndjson", "A.JSONL"):
        (tmp_path / name).write_bytes(lines)
        assert texts(tmp_path / name) == ["one", "two"]
    (tmp_path / "a.ndjson.GZ").write_bytes(gzip.compress(lines))
    assert texts(tmp_path / "a.ndjson.GZ") == ["one", "two"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts(tmp_path / "a.txt") == ["one"]


def found(tmp_path: Path, pattern: str, *exclude: str) -> list[str]:
    config = DataConfig(files=(str(tmp_path / pattern),), exclude=tuple(str(tmp_path / each) for each in exclude))
    return [str(file.relative_to(tmp_path)) for file in find_files(config)]


def test_folders_are_meant_as_they_are_named(tmp_path: Path) -> None:
    """Brackets in the name of a folder were a set of letters, and an excluded folder excluded nothing."""
    for name in ("run [v2]/a.txt", "run [v2]/old/b.txt", "run v/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert found(tmp_path, "run [v2]/*.txt") == ["run [v2]/a.txt"]
    assert found(tmp_path, "run [v2]/[a-c].txt") == ["run [v2]/a.txt"]
    assert found(tmp_path, "**/*.txt", "run [v2]/old") == ["run [v2]/a.txt", "run v/c.txt"]
    assert found(tmp_path, "**/*.txt", "run [v2]/") == ["run v/c.txt"]
    with pytest.raises(UserError, match=r"run v is a folder without \.parquet and \.arrow files: name what is in it"):
        found(tmp_path, "run v")
    with pytest.raises(UserError, match="names no file: check the path"):
        found(tmp_path, "x" * 300)
