"""Which files patterns name, and what is read of them."""

import gzip
import json
import logging
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


RECORDS = [{"text": f"{number} ü"} for number in range(5)]
LINES = "\n".join(map(json.dumps, RECORDS))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(RECORDS),
        "\ufeff\n " + json.dumps([*RECORDS, {"text": None}], indent=1, ensure_ascii=False) + "\n",
        LINES,
        "[\n" + LINES.replace("\n", "\n,") + "]",
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_json_is_records_and_goes_on_behind_each(content: str, name: str, tmp_path: Path) -> None:
    """An array was one text, brackets and all."""
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    documents = list(read_documents(tmp_path / name, "text"))
    every = [document.text for document in documents]
    assert every == [record["text"] for record in RECORDS]
    for number, document in enumerate(documents, 1):
        rest = read_documents(tmp_path / name, "text", document.next_place)
        assert [each.text for each in rest] == every[number:]


def test_json_that_is_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    records = [{"text": f"{number} " + "word " * 100_000} for number in range(8)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    assert texts(tmp_path / "a.json") == [record["text"] for record in records]


def test_json_of_one_record_or_none(tmp_path: Path) -> None:
    for content, expected in (
        ('{"text": "x"}', ["x"]),
        ('{\n"text": "x",\n"id": 1}\n', ["x"]),
        ("", []),
        (" [ ]\n", []),
    ):
        (tmp_path / "a.json").write_text(content)
        assert texts(tmp_path / "a.json") == expected
    (tmp_path / "a.json").write_text('[{"messages": [1]}]')
    assert [each.record for each in read_documents(tmp_path / "a.json", "text", kind="chat")] == [{"messages": [1]}]


AS_IT_IS = "set data.text_key, or rename the file to .txt to read it as it is"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"body": "x"}]', rf"the record at byte 1: no text under 'text' \(there is: body\): {AS_IT_IS}$"),
        ("a.json", '[{"text": "x"},\n3]', r"the record at byte 16: no text under 'text' \(there is: int\)"),
        ("a.json", '[{"text": 3}]', r"'text' is int and no text: convert it, or set data.text_key"),
        ("a.json", '{"data": [{"text": "x"}]}', r"; of records under 'data' write the list alone$"),
        ("a.json", '{\n"data": [{"text": "x"}]}', r"its one object: .*; of records under 'data' write the list alone$"),
        ("a.json", "some text", r"not JSON .*: correct it, or rename it to .txt to read it as it is$"),
        ("a.json", '[{"text": "x"}', r"not JSON at byte 14 \(it ends without \]\)"),
        ("a.json", '[{"text": "x"', r"not JSON at byte 1 \(Expecting"),
        ("a.json", '[{"text": "x"} {"text": "y"}]', r"not JSON at byte 15 \('\{' in the place of , or \]\)"),
        ("a.json", '[{"text": "x"},]', r"not JSON at byte 15"),
        ("a.json", '[{"text": "x"}]\n[]', r"not JSON at byte 16 \('\[' behind its end\)"),
        ("a.json", "[" * 100_000, r"not JSON at byte 1 \(maximum recursion"),
        ("a.json", '[{"text": "\\ud800"}]', r"the record at byte 1 has half of a surrogate pair"),
        ("a.jsonl", '[{"text": "x"}]', r"line 1: .*, or rename the file to .json where it holds one array$"),
        ("a.jsonl", '[\n{"text": "x"}]', r"line 1 is not JSON .*: rename it to .json$"),
    ],
)
def test_json_that_is_no_records(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        texts(tmp_path / name)


def test_json_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"text": "x"}, {"text": "\xff"}]')
    with pytest.raises(UserError, match=r"a\.json: not UTF-8 text \(invalid start byte at byte 26\)"):
        texts(tmp_path / "a.json")


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


def test_a_pattern_that_leaves_nothing_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and a folder that a pattern matches goes with all that is in it."""
    for name in ("a.txt", "old/b.txt", "new/old/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path, "**/*.txt", "**/old") == ["a.txt"]
        assert not caplog.messages
        for _ in range(2):
            assert len(found(tmp_path, "**/*.txt", "olds/*")) == 3
    said = f"data.exclude: {tmp_path}/olds/* matches none of the 3 files of data.files: check it"
    assert caplog.messages == [said]
