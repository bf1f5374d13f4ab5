"""`antiphon tune`: a table that cannot be written is refused before measuring, and appears whole, with the
product that experts use."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.cli import tune
from antiphon.models.config import load_model_spec
from antiphon.specs.model import FeedForwardSpec, ModelSpec, RouterSpec

CPU = torch.device("cpu")


def test_a_table_that_cannot_be_written_is_refused_before_measuring(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.triton, "load", lambda name: SimpleNamespace(read_table=lambda path: {}))
    monkeypatch.setattr(tune, "_experts", lambda *arguments: pytest.fail("it measures"))
    spec = load_model_spec(checkpoint)
    (tmp_path / "file").write_text("")
    for out, said in ((tmp_path, "is a folder: name a file"), (tmp_path / "file" / "t.json", "its folder cannot be")):
        with pytest.raises(UserError, match=said):
            tune._show_times(spec, 0, "bf16", [8], CPU, out, None)


@pytest.fixture
def measured(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Small experts, few tiles, and made-up times by which grouped_mm is quicker."""
    if not tune.triton.is_installed() or not tune.triton.interprets():
        pytest.skip("Triton does not interpret here")
    tuning, tiles = (tune.triton.load(name) for name in ("tune", "tiles"))
    spec = replace(
        load_model_spec(checkpoint),
        hidden_size=16,
        router=RouterSpec(num_experts=3, top_k=2),
        feed_forward=FeedForwardSpec(intermediate=24),
    )
    monkeypatch.setattr(tuning, "candidates", lambda *given: [tiles.default_tile(*given)])
    monkeypatch.setattr(
        tuning, "measure_s", lambda way: 1.0 if getattr(way, "func", None) is tuning.grouped_products else 2.0
    )
    return spec


def test_the_table_says_which_product_is_the_quickest(
    measured: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are made up; `other` is an entry of before."""
    out, tiles = tmp_path / "tiles.json", tune.triton.load("tiles")
    tiles.write_table(out, {("other",): tiles.TunedWeight()})
    tune._show_times(measured, 0, "bf16", [8], CPU, out, None)
    found = tiles.read_table(out)
    assert [entry.product for entry in found.values()] == ["triton", "grouped_mm", "triton"]
    assert [key[2:5] for key in found][1:] == [(2, 24, 16), (1, 16, 24)]
    assert "8 tokens: triton 2000000.0 us, grouped_mm 1000000.0 us" in capsys.readouterr().out
    tune._show_times(measured, 0, "fp8", [8], CPU, out, None)
    assert [entry.product for entry in tiles.read_table(out).values()][3:] == ["triton", "triton"]


def test_a_table_that_is_not_written_to_its_end_leaves_the_former_one(
    measured: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, entries: object) -> None:
        path.write_text('{"entries": [')
        raise OSError(28, "No space left on device")

    out = tmp_path / "tiles.json"
    out.write_text("before")
    tiles = tune.triton.load("tiles")
    monkeypatch.setattr(tiles, "read_table", lambda path: {})
    monkeypatch.setattr(tiles, "write_table", half)
    with pytest.raises(UserError, match="No space left on device"):
        tune._show_times(measured, 0, "bf16", [8], CPU, out, None)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
