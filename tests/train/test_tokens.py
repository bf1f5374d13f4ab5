"""Tokenizing: what is written, going on after a kill, and files that cannot be read."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.train import tokens
from antiphon.train.config import DataConfig
from antiphon.train.documents import read_documents
from antiphon.train.tokens import open_tokens, tokenize
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
    train, held_out = (open_tokens(tmp_path / "whole", split) for split in tokens.SPLITS)
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

    def stopping(documents: object) -> object:
        nonlocal batches
        batches += 1
        if batches % (stop_after + 1) == 0:
            raise Stopped
        return original(documents)  # type: ignore[arg-type]

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


def test_a_kill_loses_a_chunk_at_most(tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]]) -> None:
    config, whole = prepared
    cache = tmp_path / "killed"
    script = f"""
import time
from dataclasses import replace
from pathlib import Path
from antiphon.models.config import load_model_spec
from antiphon.train import tokens
from antiphon.train.config import DataConfig
tokens._CHUNK_BYTES, tokens._BATCH_TEXTS = 500, 7
whole = tokens._batch
def slowly(documents):
    time.sleep(0.02)
    return whole(documents)
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
    assert 0 < reached["num_documents"] < 160
    run(config, tmp_path, cache)
    assert bytes_of(cache) == whole


def test_what_was_left_of_other_data_is_not_used(tmp_path: Path, prepared: tuple[DataConfig, dict[str, bytes]]) -> None:
    config, whole = prepared
    cache = tmp_path / "other"
    cache.mkdir()
    other = {"made_from": "other", "file": 3, "place": 1, "num_documents": 3, "train": {}, "held_out": {}}
    (cache / "progress.json").write_text(json.dumps(other))
    run(config, tmp_path, cache)
    assert bytes_of(cache) == whole


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    config = write_all_kinds(tmp_path)
    files = tokens.find_files(config)
    told: list[tuple[float, float | None]] = []
    list(tokens._documents(config, files, tokens._Reached(), lambda done, total: told.append((done, total))))
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


def test_a_damaged_page_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"{number} {LINES[0]}" for number in range(999)]}), table)
    data = bytearray(table.read_bytes())
    data[100:400] = bytes(300)
    table.write_bytes(bytes(data))
    assert "not a Parquet file that can be read (" in refused(table)


def test_no_text_at_all(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=r"1 files hold no text to train on: check data.files"):
        run(DataConfig(files=(str(tmp_path / "empty.txt"),)), tmp_path, tmp_path / "cache")
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(UserError, match=r"all documents are held out: lower data.held_out \(now 0.999\)"):
        run(DataConfig(files=(str(tmp_path / "one.txt"),), held_out=0.999), tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache/meta.json").exists()


def test_pieces_change_tokens_and_not_the_text(tmp_path: Path, prepared: tuple[DataConfig, object]) -> None:
    config, _ = prepared
    run(replace(config, pieces=9), tmp_path, tmp_path / "pieces")
    tokenizer = tokens.load_tokenizer(tmp_path / "model")
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
        tokens.load_tokenizer(tmp_path)
