"""The loss on documents that are never trained on: over all of them, by source, with its error."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.passes import HeldOutLoss, Passes, held_out_loss
from antiphon.train.samples import Samples, epochs_of
from antiphon.train.setup import build_model, prepare
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.token_file import SourceTokens, TokenFile
from antiphon.train.trainer import Trainer
from tests.train.harness import LINES, config_of


def loss_on(tokens: TokenFile, config: TrainConfig, folder: Path) -> HeldOutLoss:
    spec, mesh = load_model_spec(folder / "model"), connect(Sizes(), 0)
    model = build_model(spec, config, config.sequence_length, mesh)
    found = held_out_loss(config, mesh, tokens, Passes(model, config.loss, StepSpans()), Shards(model))
    assert found is not None
    return found


def stream(ids: Any, *sources: SourceTokens) -> TokenFile:
    starts = np.arange(0, len(ids), 24)
    return TokenFile(np.asarray(ids, dtype=np.uint16), starts, 0, sources=sources)


def test_all_of_the_text_counts_by_its_tokens(tmp_path: Path) -> None:
    """It was the first 64 windows in file order: of 200 windows, the first 64 are one repeated token here."""
    config = config_of(tmp_path, "output.evaluate_sequences=0")
    easy, hard = [7] * (64 * 16), np.random.default_rng(0).integers(1, 300, 136 * 16 + 9).tolist()
    whole = loss_on(stream([*easy, *hard]), config, tmp_path)
    parts = [loss_on(stream(each), config, tmp_path) for each in (easy, hard)]
    assert whole.num_targets == pytest.approx(sum(each.num_targets for each in parts), rel=5e-3)
    mean = sum(each.loss * each.num_targets for each in parts) / sum(each.num_targets for each in parts)
    assert whole.loss == pytest.approx(mean, rel=1e-3)
    some = loss_on(stream([*easy, *hard]), config_of(tmp_path, "output.evaluate_sequences=64"), tmp_path)
    assert some.error is not None
    assert abs(some.loss - whole.loss) < 4 * some.error
    assert some.num_targets < whole.num_targets / 2


def test_the_error_is_that_of_repeated_samples(tmp_path: Path) -> None:
    config = config_of(tmp_path, "output.evaluate_sequences=0")
    random = np.random.default_rng(1)
    found = [loss_on(stream(random.integers(1, 300, 40 * 16)), config, tmp_path) for _ in range(12)]
    spread = float(torch.tensor([each.loss for each in found]).std())
    claimed = sum(each.error or math.nan for each in found) / len(found)
    assert 0.4 * spread < claimed < 2.5 * spread


def test_each_source_has_its_loss_however_small(tmp_path: Path) -> None:
    config = config_of(tmp_path, "output.evaluate_sequences=8")
    ids = [*([7] * 1600), *range(1, 11)]
    found = loss_on(stream(ids, SourceTokens("large", 0, 1600), SourceTokens("small", 1600, 1610)), config, tmp_path)
    assert list(found.by_source) == ["large", "small"]
    assert found.by_source["small"].num_targets == 8, "less than a window, of two documents"
    total = sum(each.loss * each.num_targets for each in found.by_source.values())
    assert found.loss == pytest.approx(total / found.num_targets)
    assert found.metrics()["held_out_loss_by_source"].keys() == {"large", "small"}


SOURCES = """
[[data.sources]]
name = "cats"
files = ["cats.jsonl"]
{cats}
[[data.sources]]
name = "rain"
files = ["rain.jsonl"]
{rain}
"""


def write_sources(folder: Path, **shares: str) -> TrainConfig:
    config_of(folder)
    for name, line, count in (("cats", LINES[0], 60), ("rain", LINES[3], 20)):
        records = [json.dumps({"text": f"{number} {line}"}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(records) + "\n")
    file = folder / "train.toml"
    text = file.read_text().replace('files = ["text/*.txt"]\n', "")
    file.write_text(text + SOURCES.format(**({"cats": "", "rain": ""} | shares)))
    return read_config(file)


def counts(config: TrainConfig, tokens: TokenFile) -> list[int]:
    """Samples of each source in one pass."""
    samples = Samples.of(config, tokens, shuffled=True)
    numbers = [samples._window(number) for number in range(samples.num_windows)]
    return np.bincount(samples.sources[numbers], minlength=2).tolist()


def test_sources_are_seen_by_weight_or_epochs_in_an_order_of_their_own(tmp_path: Path) -> None:
    tokens = stream([7] * 32010, SourceTokens("cats", 0, 24005), SourceTokens("rain", 24005, 32010))
    assert counts(write_sources(tmp_path / "a"), tokens) == [1500, 500]
    assert counts(write_sources(tmp_path / "b", rain="epochs = 2.5"), tokens) == [1500, 1250]
    weighed = write_sources(tmp_path / "c", cats="weight = 1.0", rain="weight = 3.0")
    first, second = counts(weighed, tokens)
    assert first == 1500, "every window is seen"
    assert second == pytest.approx(3 * first, rel=2e-3)
    assert epochs_of(weighed.data, [24005, 8005]) == pytest.approx((1.0, 3 * 24005 / 8005))
    halves = Samples.of(write_sources(tmp_path / "d", rain="epochs = 0.5"), tokens, shuffled=True)
    passes = [
        {halves._window(turn * halves.num_windows + number) for number in range(halves.num_windows)}
        for turn in range(2)
    ]
    assert passes[0] != passes[1], "each pass has another half"


SETS = """
[[data.evaluation]]
name = "known"
files = ["known.txt"]
[[data.evaluation]]
name = "strange"
kind = "answers"
files = ["strange.jsonl"]
"""


def test_evaluation_sets_have_losses_of_their_own(tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "known.txt").write_text("\n".join(LINES * 4))
    strange = [{"prompt": "the cat sat", "answer": "zq9 %& xkcd vv!! 77"} for _ in range(5)]
    (tmp_path / "strange.jsonl").write_text("".join(json.dumps(each) + "\n" for each in strange))
    changes = ("steps=60", "output.checkpoint_every=0", "output.keep_best=true", "output.evaluate_every=30")
    plain = Trainer(prepare(read_config(tmp_path / "train.toml", changes))).run()
    file = tmp_path / "sets.toml"
    file.write_text((tmp_path / "train.toml").read_text().replace('"out"', '"out2"') + SETS)
    facts = Trainer(prepare(read_config(file, changes))).run()
    assert facts["held_out_loss"] == plain["held_out_loss"], "the sets do not count in it"
    assert facts["evaluation_loss"]["known"] < facts["evaluation_loss"]["strange"] - 1
    assert facts["held_out_targets"] == plain["held_out_targets"]
    lines = [json.loads(line) for line in (tmp_path / "out2/metrics.jsonl").read_text().splitlines()]
    assert sum("evaluation_loss" in line for line in lines) == 2
    alone = Trainer(prepare(read_config(file, (*changes[:2], "data.held_out=0", 'output.folder="out3"')))).run()
    both = alone["evaluation_loss"]
    assert min(both.values()) < alone["held_out_loss"] < max(both.values())
    again = Trainer(prepare(read_config(file, ("steps=61", *changes[1:])))).run()
    assert again["steps"] == 61, "sets may come and go: what is trained on is the same"


def test_an_evaluation_set_without_a_document(tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "known.txt").write_text("")
    file = tmp_path / "sets.toml"
    first = SETS.partition("[[data.evaluation]]\nname = 'strange'".replace("'", '"'))[0]
    file.write_text((tmp_path / "train.toml").read_text() + first)
    with pytest.raises(UserError, match=r"data.evaluation: 'known' has no document: give it files with text, or"):
        prepare(read_config(file))


def test_another_evaluation_set_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    text = prepare(config)
    assert text.lock is not None
    text.lock.close()
    meta = tmp_path / "out/tokens/meta.json"
    written_ns = meta.stat().st_mtime_ns
    (tmp_path / "known.txt").write_text("\n".join(LINES * 4))
    file = tmp_path / "sets.toml"
    first = SETS.partition("[[data.evaluation]]\nname = 'strange'".replace("'", '"'))[0]
    file.write_text((tmp_path / "train.toml").read_text() + first)
    both = prepare(read_config(file))
    assert meta.stat().st_mtime_ns == written_ns
    assert both.text == text.text
    own = text.held_out.ids.shape[0]
    assert (both.held_out.ids[:own] == text.held_out.ids).all()
    assert [(each.name, each.first, each.is_evaluation) for each in both.held_out.sources][-1] == ("known", own, True)
    assert both.held_out.starts[-1] == own
