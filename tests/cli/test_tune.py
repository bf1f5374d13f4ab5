"""`antiphon tune`: a table that cannot be written is refused before measuring; it appears whole, and beside it what
experts and attention use, and why."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.cli import tune
from antiphon.kernels import packages
from antiphon.kernels.choices import choices_path, read_choices, read_table, write_table
from antiphon.models.config import load_model_spec
from antiphon.specs.model import FeedForwardSpec, ModelSpec, RouterSpec

CPU = torch.device("cpu")


def test_a_table_that_cannot_be_written_is_refused_before_measuring(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_experts", lambda *arguments: pytest.fail("it measures"))
    spec = load_model_spec(checkpoint)
    (tmp_path / "file").write_text("")
    for out, said in ((tmp_path, "is a folder: name a file"), (tmp_path / "file" / "t.json", "file is a file: name")):
        with pytest.raises(UserError, match=said):
            tune._show_times(spec, 0, "bf16", [8], CPU, out, None)


@pytest.fixture
def measured(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """Small experts, few tiles, short contexts, and made-up times by which other packages are twice as quick."""
    if not tune.triton.is_installed() or not tune.triton.interprets():
        pytest.skip("Triton does not interpret here")
    tuning, grouped = tune._search(), tune.triton.load("grouped")
    spec = replace(
        load_model_spec(checkpoint),
        hidden_size=16,
        router=RouterSpec(num_experts=3, top_k=2),
        feed_forward=FeedForwardSpec(intermediate=24),
    )
    monkeypatch.setattr(tuning, "candidates", lambda *given: [grouped.default_tile(*given)])
    monkeypatch.setattr(tune, "CONTEXTS", (8, 16))
    products, asked = packages.products, []
    monkeypatch.setattr(packages, "products", lambda *given, **how: asked.append(given[0]) or products(*given, **how))

    def seconds(way: object) -> float:
        asked.clear()
        assert callable(way)
        assert isinstance(way(), Tensor)
        return 1.0 if asked else 2.0

    monkeypatch.setattr(tuning, "measure_s", seconds)
    monkeypatch.setattr(torch, "equal", lambda found, alone: True)  # bits of products on a CPU are not the matter here
    return spec


def test_the_files_say_what_is_the_quickest(
    measured: ModelSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are made up; `other` is an entry of before."""
    out = tmp_path / "tiles.json"
    write_table(out, {("other",): []})
    tune._show_times(measured, 0, "bf16", [8], CPU, out, None)
    assert [key[2:5] for key in read_table(out)][1:] == [(2, 24, 16), (1, 16, 24)]
    chosen = read_choices(choices_path(out))
    assert [(key[0], name) for key, (name, _) in chosen.items()] == [("experts", "grouped_mm"), ("attention", "triton")]
    said = " ".join(capsys.readouterr().out.split())
    assert "experts use grouped_mm: 2.00 times as quick as triton, deep_gemm: takes float8 experts" in said
    assert "attention of single rows uses triton: varlen_attn: " in said
    tune._show_times(measured, 0, "fp8", [8], CPU, out, None)
    chosen = read_choices(choices_path(out))
    assert [(key[0], name) for key, (name, _) in chosen.items()] == [
        ("experts", "grouped_mm"),
        ("attention", "triton"),
        ("experts", "triton"),
    ]


def test_a_table_that_is_not_written_to_its_end_leaves_the_former_one(
    measured: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, entries: object) -> None:
        path.write_text('{"entries": [')
        raise OSError(28, "No space left on device")

    out = tmp_path / "tiles.json"
    out.write_text("before")
    monkeypatch.setattr(tune, "read_table", lambda path: {})
    monkeypatch.setattr(tune, "write_table", half)
    with pytest.raises(UserError, match="No space left on device"):
        tune._show_times(measured, 0, "bf16", [8], CPU, out, None)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
