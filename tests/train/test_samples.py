"""Samples by their global number: every window once a pass, documents kept apart, the same for whoever asks."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from antiphon.base.errors import UserError
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec
from antiphon.train.documents import read_documents
from antiphon.train.samples import Samples
from antiphon.train.setup import cache_of, prepare_data
from antiphon.train.token_file import TokenFile
from antiphon.train.tokens import open_tokens
from tests.train.harness import config_of

CPU = torch.device("cpu")


def stream(lengths: list[int]) -> TokenFile:
    """Documents of these lengths; ids count up."""
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenFile(np.arange(sum(lengths), dtype=np.uint16), starts, 0)


def test_a_pass_sees_every_window_once_and_each_pass_has_its_own_order() -> None:
    samples = Samples(stream([50, 31]), 8, seed=3, document_masks=False)
    assert samples.num_windows == 10
    first, second = (
        [int(samples.batch([number], CPU).ids_BS[0, 0]) for number in range(turn * 10, turn * 10 + 10)]
        for turn in (0, 1)
    )
    assert sorted(first) == sorted(second) == list(range(0, 80, 8))
    assert first != second
    together = samples.batch(range(20), CPU).ids_BS[:, 0].tolist()
    assert together == first + second, "in one batch or in many"


def test_documents_in_one_window_are_kept_apart() -> None:
    batch = Samples(stream([3, 4, 10]), 8, seed=0, document_masks=True, shuffled=False).batch([0, 1], CPU)
    assert batch.documents_BS is not None
    assert batch.documents_BS[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert batch.positions_BS[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert batch.targets_BS[0].tolist() == [1, 2, IGNORED, 4, 5, 6, IGNORED, 8]
    assert batch.positions_BS[1].tolist() == list(range(8)), "a window that begins within a document counts from there"
    assert batch.targets_BS[1].tolist() == list(range(9, 17))


def test_the_ids_are_those_of_the_documents_and_made_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    spec = load_model_spec(tmp_path / "model")
    prepare_data(config, spec)
    train, held_out = (open_tokens(cache_of(config), split) for split in ("train", "held_out"))
    assert len(train.starts) + len(held_out.starts) == 40
    assert 0 < len(held_out.starts) < 15
    assert all(train.ids[start - 1] == spec.eos_token_ids[0] for start in train.starts[1:])
    before = (cache_of(config) / "train.bin").stat().st_mtime_ns
    prepare_data(config, spec)
    assert (cache_of(config) / "train.bin").stat().st_mtime_ns == before
    (tmp_path / "text/000.txt").write_text("something else\n")
    prepare_data(config, spec)
    assert (cache_of(config) / "train.bin").stat().st_mtime_ns != before


def texts_of(file: Path, text_key: str) -> list[str]:
    return [document.text for document in read_documents(file, text_key)]


def test_ids_that_are_written_anew_stay_whole_for_a_run_that_has_them_open(tmp_path: Path) -> None:
    """A run whose mapped file is cut off under it would end without a word."""
    config = config_of(tmp_path)
    spec = load_model_spec(Path(config.model.path))
    prepare_data(config, spec)
    opened = open_tokens(cache_of(config), "train")
    before = opened.ids.tolist()
    for file in sorted((tmp_path / "text").iterdir())[1:]:
        file.unlink()
    prepare_data(config, spec)
    assert opened.ids.tolist() == before
    assert open_tokens(cache_of(config), "train").ids.shape[0] < len(before)


def test_documents_of_every_format(tmp_path: Path) -> None:
    texts = ["one", "two\nlines", "drei"]
    (tmp_path / "a.txt").write_text(texts[1])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n\n" for text in [*texts, ""]))
    table = pyarrow.table({"id": [1, 2, 3, 4], "body": [*texts, None]})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    assert texts_of(tmp_path / "a.txt", "body") == texts[1:2]
    assert texts_of(tmp_path / "b.jsonl", "body") == texts
    assert texts_of(tmp_path / "c.parquet", "body") == texts
    with pytest.raises(UserError, match=r"c.parquet: no column 'text' \(there is: id, body\): set data.text_key"):
        texts_of(tmp_path / "c.parquet", "text")
