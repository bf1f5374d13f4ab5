"""Parts that are frozen, and rates by pattern."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.train.setup import build_model, prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import LATENT, config_of

PARTS = {
    "router": (["*.router"], lambda name: name.endswith((".router", ".score_bias"))),
    "embeddings": (["embedding", "head"], lambda name: name in ("embedding", "head")),
    "all but experts": (["*", "!*.experts_*"], lambda name: ".experts_" not in name),
}


def before_and_after(folder: Path, *changes: str, **model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = prepare(config_of(folder, *changes, **model))
    first = build_model(run.spec, run.config, run.config.sequence_length, run.mesh).state_dict()
    trainer = Trainer(run)
    trainer.run()
    return {name: each.clone() for name, each in first.items()}, trainer.model.state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("part", PARTS)
def test_frozen_parts_keep_their_bits_and_the_rest_learns(tmp_path: Path, part: str, optimizer: str) -> None:
    patterns, is_frozen = PARTS[part]
    model = LATENT if part == "router" else {}
    first, last = before_and_after(
        tmp_path, f"optimizer.frozen={patterns}", f"optimizer.name={optimizer}", "loss.bias_rate=0.1", **model
    )
    for name, value in first.items():
        assert torch.equal(value, last[name]) == is_frozen(name), name


def test_the_norm_is_of_what_is_trained(tmp_path: Path) -> None:
    norms: list[float] = []
    for name, changes in (("all", ()), ("some", ('optimizer.frozen=["*", "!embedding"]',))):
        run = prepare(config_of(tmp_path / name, "steps=1", *changes))
        Trainer(run, lambda result: norms.append(result.norm)).run()
    assert norms[1] < 0.9 * norms[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_by_pattern_scale_a_step(tmp_path: Path, optimizer: str) -> None:
    moves = []
    for name, rates in (("a", "{}"), ("b", '{"layers.*" = 0.5, "layers.1.*" = 0.0}')):
        first, last = before_and_after(
            tmp_path / name, f"optimizer.rates={rates}", f"optimizer.name={optimizer}", "steps=1"
        )
        moves.append({key: last[key] - first[key] for key in first})
    for key, whole in moves[0].items():
        factor = 0.0 if key.startswith("layers.1.") else 0.5 if key.startswith("layers.") else 1.0
        torch.testing.assert_close(moves[1][key], whole * factor, rtol=1e-3, atol=1e-7)


def test_patterns_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for change, said in (
        ('optimizer.frozen=["*.gate"]', r"optimizer.frozen: '\*.gate' matches no parameter: .* experts_down, .*router"),
        ('optimizer.rates={"experts" = 2.0}', "optimizer.rates: 'experts' matches no parameter"),
        ('optimizer.frozen=["*"]', "optimizer.frozen freezes all parameters"),
    ):
        with pytest.raises(UserError, match=said):
            Trainer(prepare(config_of(tmp_path, change))).run()
