"""Tokenizing: what is written, going on after a kill, and files that cannot be read."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from antiphon.base.errors import UserError
from antiphon.base.system import one_writer
from antiphon.models.config import load_model_spec
from antiphon.train import documents, tokens
from antiphon.train.config_tables import DataConfig, SourceConfig
from antiphon.train.documents import Document, find_files, read_documents
from antiphon.train.encoder import load_tokenizer
from antiphon.train.tokens import BEGINNING, SPLITS, Reached, TokenSize, open_tokens, tokenize
from tests.train.harness import LINES, write_model, write_text

FILES = ("train.bin", "train.starts", "held_out.bin", "held_out.starts", "meta.json")


def write_all_kinds(folder: Path) -> DataConfig:
    """Text, JSON lines and Parquet; 160 documents."""
    write_text(folder / "text")
    lines = [json.dumps({"text": f"{number} {LINES[number % 4]}"}) for number in range(60)]
    (folder / "lines.jsonl").write_text("\n\n".join(lines) + "\n")
    table = pyarrow.table({"text": [None if number == 7 else f"{LINES[number % 4]} {number}" for number in range(61)]})
    parquet.write_table(table, folder / "table.parquet", row_group_size=13)
    patterns = (str(folder / "text/*.txt"), str(folder / "lines.jsonl"), str(folder / "table.parquet"))
    return DataConfig(files=patterns, held_out=0.2)


def bytes_of(cache: Path) -> dict[str, bytes]:
    return {name: (cache / name).read_bytes() for name in FILES}


def run(config: DataConfig, folder: Path, cache: Path) -> None:
    tokenize(config, folder / "model", load_model_spec(folder / "model"), cache, seed=3)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[DataConfig, dict[str, bytes]]:
    """What to tokenize, and what an undisturbed run writes."""
    write_model(tmp_path / "model")
    config = write_all_kinds(tmp_path)
    run(config, tmp_path, tmp_path / "whole")
    return config, bytes_of(tmp_path / "whole")


def test_all_documents_of_all_kinds_are_there_once(tmp_path: Path, prepared: tuple[DataConfig, object]) -> None:
    train, held_out = (open_tokens(tmp_path / "whole", split) for split in SPLITS)
    assert len(train.starts) + len(held_out.starts) == 40 + 60 + 60
    assert 16 < len(held_out.starts) < 50
    for each in (train, held_out):
        assert each.starts[0] == 0
        assert np.all(each.ids[each.starts[1:] - 1] == 0), "each document ends with the end mark"
        assert each.ids[-1] == 0
    assert not (tmp_path / "whole/progress.json").exists()


@pytest.mark.parametrize("stop_after", [1, 2, 5, 9])
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(
    tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    config, whole = prepared
    monkeypatch.setattr(tokens, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(tokens, "_BATCH_TEXTS", 7)
    batches = 0
    original = tokens._batch

    class Stopped(Exception):
        pass

    def stopping(documents: object, most: int) -> object:
        nonlocal batches
        batches += 1
        if batches % (stop_after + 1) == 0:
            raise Stopped
        return original(documents, most)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "_batch", stopping)
    cache = tmp_path / "broken"
    num_starts = 0
    while not (cache / "meta.json").exists():
        num_starts += 1
        assert num_starts < 60, "it gets on"
        try:
            run(config, tmp_path, cache)
        except Stopped:
            with (cache / "train.bin").open("ab") as torn:
                torn.write(b"half a chunk")
    assert num_starts > 1
    assert bytes_of(cache) == whole


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0])
def test_ids_that_are_not_whole_are_made_again(
    tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]], name: str, left: float
) -> None:
    config, whole = prepared
    file = tmp_path / "whole" / name
    file.write_bytes(whole[name][: int(left * (len(whole[name]) - 1))])
    run(config, tmp_path, tmp_path / "whole")
    assert bytes_of(tmp_path / "whole") == whole
    file.unlink()
    run(config, tmp_path, tmp_path / "whole")
    assert bytes_of(tmp_path / "whole") == whole


def test_a_kill_loses_a_chunk_at_most(tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]]) -> None:
    config, whole = prepared
    cache = tmp_path / "killed"
    script = f"""
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from antiphon.models.config import load_model_spec
from antiphon.train import tokens
from antiphon.train.config_tables import DataConfig
tokens._CHUNK_BYTES, tokens._BATCH_TEXTS = 500, 7
whole = tokens._batch
def slowly(documents, most):
    time.sleep(0.02)
    return whole(documents, most)
tokens._batch = slowly
config = DataConfig(files={config.files!r}, held_out=0.2)
tokens.tokenize(config, Path({str(tmp_path / "model")!r}), load_model_spec(Path({str(tmp_path / "model")!r})),
                Path({str(cache)!r}), seed=3)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 120
        while not (cache / "progress.json").exists():
            assert time.monotonic() < deadline, "no chunk within 120 s"
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.005)
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    reached = json.loads((cache / "progress.json").read_text())
    done = sum(size["num_documents"] for split in SPLITS for size in reached[split].values())
    assert 0 < done < 160
    run(config, tmp_path, cache)
    assert bytes_of(cache) == whole


def test_what_was_left_of_other_data_is_not_used(tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]]) -> None:
    config, whole = prepared
    cache = tmp_path / "other"
    cache.mkdir()
    other = {"made_from": "other", "file": 3, "place": 1, "train": {}, "held_out": {}, "first": {}}
    (cache / "progress.json").write_text(json.dumps(other))
    run(config, tmp_path, cache)
    assert bytes_of(cache) == whole


def test_progress_that_lacks_a_field_or_has_another_one_is_a_new_beginning(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    reached = Reached("this", 3, 1, {"files": TokenSize(5, 1, 20, "digest")}, {}, {})

    def read_again(entries: object) -> Reached:
        file.write_text(json.dumps(entries))
        return Reached.read(file, "this")

    entries = asdict(reached)
    assert read_again(entries) == reached
    assert read_again(entries | {"made_from": "other"}) == BEGINNING
    assert read_again(entries | {"more": 1}) == BEGINNING
    assert read_again([]) == BEGINNING
    for name in entries:
        assert read_again({key: each for key, each in entries.items() if key != name}) == BEGINNING, name
    size = entries["train"]["files"]
    assert read_again(entries | {"train": {"files": size | {"more": 1}}}) == BEGINNING
    for name in size:
        less = {key: each for key, each in size.items() if key != name}
        assert read_again(entries | {"train": {"files": less}}) == BEGINNING, name


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    config = write_all_kinds(tmp_path)
    files = find_files(config)
    told: list[tuple[float, float | None]] = []
    sources = config.all_sources()
    for _, found in tokens._documents(sources, [files], BEGINNING, lambda *each: told.append(each)):
        list(found)
    total = sum(file.stat().st_size for file in files)
    assert {of for _, of in told} == {total}
    done = [amount for amount, _ in told]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(done) > 100


def refused(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents(file, "text"))
    return str(caught.value)


def test_files_that_cannot_be_read_are_named_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc\0def")
    assert refused(file) == f"{file}: holds a zero byte at byte 3, so it is not text: exclude it (data.exclude)"
    file.write_bytes(b"abcd\xff\xfe")
    assert "not UTF-8 text (invalid start byte at byte 4)" in refused(file)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"text": "fine"}\n\n{"text": "\xff"}\n')
    assert "not UTF-8 text (invalid start byte at byte 28)" in refused(lines)
    lines.write_bytes(b'{"text": "fine"}\n\0\n')
    assert "holds a zero byte at byte 17" in refused(lines)
    lines.write_bytes(b'{"text": "fine"}\n\n[1]\n')
    assert "line 3: no text under 'text' (there is: list)" in refused(lines)
    table = tmp_path / "a.parquet"
    table.write_bytes(b"PAR1 is not all")
    assert f"{table}: not a Parquet file that can be read (" in refused(table)
    parquet.write_table(pyarrow.table({"body": ["x"]}), table)
    assert "no column 'text' (there is: body): set data.text_key" in refused(table)
    for value, found in ((b"x", "bytes"), (5, "int"), (["x"], "list")):
        parquet.write_table(pyarrow.table({"text": [None, value]}), table)
        assert f"{table}: row 2: 'text' is {found} and no text: convert it" in refused(table)
    lines.write_text('{"text": "\\ud83c\\udfd6"}\n{"text": "\\uD83C"}\n')
    assert f"{lines}: line 2 has half of a surrogate pair: correct or exclude it" in refused(lines)
    lines.write_text('{"text": 5}\n')
    assert "line 1: 'text' is int and no text: convert it, or set data.text_key" in refused(lines)


def test_a_damaged_page_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"{number} {LINES[0]}" for number in range(999)]}), table)
    data = bytearray(table.read_bytes())
    data[100:400] = bytes(300)
    table.write_bytes(bytes(data))
    assert "not a Parquet file that can be read (" in refused(table)


def test_two_runs_do_not_write_one_folder(
    tmp_path: Path, prepared: tuple[DataConfig, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of ids may be that of several runs (`data.cache`)."""
    monkeypatch.setattr(tokens, "WRITER_S", 0.05)
    with one_writer(tmp_path / "cache", "wait"), pytest.raises(UserError, match="cache: another run writes token ids"):
        run(prepared[0], tmp_path, tmp_path / "cache")
    run(prepared[0], tmp_path, tmp_path / "cache")
    assert bytes_of(tmp_path / "cache") == prepared[1]


def test_files_that_change_while_they_are_read(
    tmp_path: Path, prepared: tuple[DataConfig, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids would be of neither text."""
    more = tmp_path / "more.txt"
    more.write_text("one")
    config = replace(prepared[0], files=(*prepared[0].files, str(more)))

    def read_and_change(*arguments: Any) -> Iterator[Document]:
        more.write_text("one and two")
        return read_documents(*arguments)

    with monkeypatch.context() as changing:
        changing.setattr(tokens, "read_documents", read_and_change)
        with pytest.raises(UserError, match=r"files of data\.files changed while they were read: start again"):
            run(config, tmp_path, tmp_path / "cache")
    run(config, tmp_path, tmp_path / "cache")


def test_no_text_at_all(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"1 files hold no text to train on: check data.files"):
        run(DataConfig(files=(str(tmp_path / "empty.txt"),)), tmp_path, tmp_path / "cache")
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(UserError, match=r"all documents are held out: lower data.held_out \(now 0.999\)"):
        run(DataConfig(files=(str(tmp_path / "one.txt"),), held_out=0.999), tmp_path, tmp_path / "cache")
    (tmp_path / "null.jsonl").write_text('{"text": null}')
    sources = [SourceConfig(name=name, files=(str(tmp_path / name),)) for name in ("one.txt", "null.jsonl")]
    with pytest.raises(UserError, match=r"^source 'null.jsonl': 1 files hold no text to train on: check data.files"):
        run(DataConfig(sources=tuple(sources), held_out=0), tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache/meta.json").exists()


def test_pieces_change_tokens_and_not_the_text(tmp_path: Path, prepared: tuple[DataConfig, object]) -> None:
    config, _ = prepared
    run(replace(config, pieces=9), tmp_path, tmp_path / "pieces")
    tokenizer = load_tokenizer(tmp_path / "model")
    texts, ids = [], []
    for folder in ("whole", "pieces"):
        found = open_tokens(tmp_path / folder, "train")
        ids.append(found.ids.tolist())
        texts.append(tokenizer.decode(ids[-1]))
    assert texts[0] == texts[1]
    assert len(ids[1]) > len(ids[0])
    assert bytes_of(tmp_path / "pieces")["held_out.bin"] == bytes_of(tmp_path / "whole")["held_out.bin"]


def test_a_tokenizer_that_the_library_panics_at_is_a_line_of_error(tmp_path: Path) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    demo = json.loads((Path(__file__).parents[2] / "examples/demo-moe/tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(demo | {"normalizer": broken}))
    with pytest.raises(UserError, match=r"no tokenizer can be read .Precompiled"):
        load_tokenizer(tmp_path)


def test_texts_are_neither_cut_nor_padded(tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]]) -> None:
    """Whatever a tokenizer's file asks for: a library that trained with it may have left its settings there."""
    config, whole = prepared
    file = tmp_path / "model/tokenizer.json"
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<end>"}
    asked = {
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": {**padding, "pad_to_multiple_of": None},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    run(config, tmp_path, tmp_path / "again")
    assert bytes_of(tmp_path / "again")["train.bin"] == whole["train.bin"]


def test_a_document_stays_on_its_side_whatever_else_is_there(tmp_path: Path) -> None:
    """The side was chosen by a running number: one more file in front, and most held-out documents were trained on."""
    write_model(tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"b{number:02d}.txt").write_text(f"{number} {LINES[number % 4]}")
    config = DataConfig(files=(str(texts / "*.txt"),), held_out=0.2)
    run(config, tmp_path, tmp_path / "before")
    (texts / "a.txt").write_text("a new first file")
    run(config, tmp_path, tmp_path / "behind")
    tokenize(config, tmp_path / "model", load_model_spec(tmp_path / "model"), tmp_path / "seed", seed=4)
    sides = [held_out_texts(tmp_path / name, tmp_path) - {"a new first file"} for name in ("before", "behind", "seed")]
    assert sides[0] == sides[1] == sides[2]
    assert 4 < len(sides[0]) < 25


def held_out_texts(cache: Path, folder: Path) -> set[str]:
    found, tokenizer = open_tokens(cache, "held_out"), load_tokenizer(folder / "model")
    ends = [*found.starts[1:], found.ids.shape[0]]
    return {tokenizer.decode(found.ids[a:b].tolist()) for a, b in zip(found.starts, ends, strict=True)}


def test_compressed_files_hold_the_same_documents_and_go_on_inside(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{number} {LINES[0]}"}) + "\n" for number in range(50)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as out:
        out.write(lines)
    plain, *packed = (list(read_documents(tmp_path / f"a.jsonl{end}", "text")) for end in ("", ".gz", ".zst"))
    for each in packed:
        assert [(found.text, found.next_place) for found in each] == [(found.text, found.next_place) for found in plain]
    for end in (".gz", ".zst"):
        rest = list(read_documents(tmp_path / f"a.jsonl{end}", "text", plain[20].next_place))
        assert [found.text for found in rest] == [found.text for found in plain[21:]]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"whole text"))
    assert [found.text for found in read_documents(tmp_path / "b.txt.gz", "text")] == ["whole text"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"whole text")[:-9])
    assert "cannot be read" in refused(tmp_path / "b.txt.gz")


def test_a_folder_that_datasets_wrote_is_its_tables(tmp_path: Path) -> None:
    folder, rows = tmp_path / "set", [f"{number} {LINES[1]}" for number in range(30)]
    folder.mkdir()
    batches = pyarrow.table({"text": rows}).to_batches(max_chunksize=7)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00002.arrow"), batches[0].schema) as out:
        for batch in batches[:3]:
            out.write_batch(batch)
    with pyarrow.ipc.new_file(str(folder / "data-00001-of-00002.arrow"), batches[0].schema) as out:
        for batch in batches[3:]:
            out.write_batch(batch)
    (folder / "dataset_info.json").write_text("{}")
    files = find_files(DataConfig(files=(str(folder),)))
    assert [found.text for file in files for found in read_documents(file, "text")] == rows
    assert [found.text for found in read_documents(files[0], "text", 9)] == rows[9:21]


def test_a_large_text_is_cut_into_documents_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_TEXT_BYTES", 100)
    text = "".join(f"{number} ä {LINES[number % 4]}\n" for number in range(40)) + "ä" * 300
    (tmp_path / "a.txt").write_text(text)
    found = list(read_documents(tmp_path / "a.txt", "text"))
    assert "".join(each.text for each in found) == text
    assert max(len(each.text.encode()) for each in found) <= 100
    assert all(each.text.endswith("\n") for each in found[:8])
    rest = list(read_documents(tmp_path / "a.txt", "text", found[4].next_place))
    assert [each.text for each in rest] == [each.text for each in found[5:]]


def test_control_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the <end> of the cat")
    config = DataConfig(files=(str(tmp_path / "a.txt"),), held_out=0.0)
    run(config, tmp_path, tmp_path / "off")
    run(replace(config, control_tokens=True), tmp_path, tmp_path / "on")
    counts = [open_tokens(tmp_path / name, "train").ids.tolist().count(0) for name in ("off", "on")]
    assert counts == [1, 2], "the end mark of the document, and with the switch the one in the text"


def test_a_token_beyond_the_embedding_is_named_with_text_and_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    entries = json.loads(file.read_text())
    size = len(entries["model"]["vocab"])
    entries["added_tokens"].append(entries["added_tokens"][0] | {"id": 500, "content": "<far>"})
    entries["model"]["vocab"]["<far>"] = 500
    file.write_text(json.dumps(entries))
    (tmp_path / "a.txt").write_text("the cat <far> sat")
    spec = load_model_spec(tmp_path / "model")
    assert size < spec.vocab_size, "its count says nothing of the id"
    config = DataConfig(files=(str(tmp_path / "a.txt"),), control_tokens=True, held_out=0.0)
    with pytest.raises(UserError, match=r"a\.txt: '<far>' in '<far> sat' is token 500, the model's embedding has 320"):
        tokenize(config, tmp_path / "model", spec, tmp_path / "cache", seed=0)


def test_files_that_are_missing_name_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chats\.jsonl names no file: make it first: python chats\.py"):
        find_files(DataConfig(files=(str(tmp_path / "chats.jsonl"),), made_by="x"), "python chats.py")
