"""`antiphon tune`: a table that cannot be written is refused before measuring, and appears whole; no Triton needed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.cli import tune
from antiphon.models.config import load_model_spec

CPU = torch.device("cpu")


def test_a_table_that_cannot_be_written_is_refused_before_measuring(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.triton, "load", lambda name: SimpleNamespace(read_table=lambda path: {}))
    monkeypatch.setattr(tune, "_stacked", lambda *arguments: pytest.fail("it measures"))
    spec = load_model_spec(checkpoint)
    (tmp_path / "file").write_text("")
    for out, said in ((tmp_path, "is a folder: name a file"), (tmp_path / "file" / "t.json", "its folder cannot be")):
        with pytest.raises(UserError, match=said):
            tune._show_times(spec, 0, "bf16", [8], CPU, out, None)


def test_a_table_that_is_not_written_to_its_end_leaves_the_former_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, entries: object) -> None:
        path.write_text('{"entries": [')
        raise OSError(28, "No space left on device")

    out = tmp_path / "tiles.json"
    out.write_text("before")
    tiles = SimpleNamespace(read_table=lambda path: {}, write_table=half)
    monkeypatch.setattr(tune.triton, "load", lambda name: tiles)
    monkeypatch.setattr(tune, "_stacked", lambda *arguments: {})
    with pytest.raises(UserError, match="No space left on device"):
        tune._show_times(load_model_spec(checkpoint), 0, "bf16", [8], CPU, out, None)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
