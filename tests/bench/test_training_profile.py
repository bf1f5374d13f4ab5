"""The trainer's parts on a tiny model, measured on one rank and on two, and what a plan makes of the tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.bench.profile.measure import QUICK
from antiphon.bench.profile.this_machine import training_profile
from antiphon.bench.profile.training import WantedTraining, few_layers, measure_training
from antiphon.cost.profile import read_profile
from antiphon.cost.training.measured import machine_of_ranks
from antiphon.cost.training.setup import trained_in
from antiphon.models.config import load_model_spec
from antiphon.planner.training import plan_training
from tests.train.harness import config_of, write_model

LENGTH = 16
BRIEF = replace(QUICK, sequences=(1, 2), sum_bytes=(1 << 10, 1 << 16), training_steps=1)


@pytest.mark.slow
def test_two_ranks_are_measured_in_every_form_and_a_plan_is_made_from_that(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = Path(config.model.path)
    wanted = WantedTraining(model=model, effort=BRIEF, sequence_length=LENGTH, ranks=(1, 2))
    seen: list[tuple[float, float | None]] = []
    tables = measure_training(wanted, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    ways = {(each.attention, each.experts, each.dispatch) for each in tables.layers if each.model_parallel == 2}
    assert len(ways) == 6
    assert {each.name for each in tables.sums if each.degree == 2} == {"all_reduce", "reduce_scatter", "all_gather"}
    assert set(tables.update) == {"adamw", "muon"}
    profile = replace(training_profile(model, "tiny", "antiphon profile"), training=tables)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(asdict(profile)))
    assert read_profile(file) == profile
    plan = plan_training(
        load_model_spec(model),
        machine_of_ranks(profile, LENGTH),
        sequence_length=LENGTH,
        global_batch=4,
        precision=trained_in("float32", zero=1),
        compress=False,
        deduplicate=True,
        overlap="none",
        profile=profile,
    )
    assert 0 < plan.predicted.iteration_s < 60
    assert 0 < plan.predicted.mfu < 1


def test_layers_of_each_kind_stand_for_all(tmp_path: Path) -> None:
    spec = load_model_spec(write_model(tmp_path, num_hidden_layers=7))
    assert few_layers(spec).moe_layers == (True, True)
    mixed = replace(spec, moe_layers=(False, *(True,) * 6))
    assert few_layers(mixed).moe_layers == (False, False, True, True)
    assert few_layers(mixed).num_layers == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (0,)}, r"--ranks is \[0\]: give numbers from 1 to 64"),
        ({"ranks": (32,)}, "--sequence-length is 16: it must be at least 32 ranks"),
        ({"sequence_length": 4096}, "--sequence-length is 4096: the model has 64 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    plain = {"model": write_model(tmp_path), "effort": BRIEF, "sequence_length": LENGTH}
    with pytest.raises(UserError, match=message):
        measure_training(WantedTraining(**(plain | changes)), lambda done, total: None)  # type: ignore[arg-type]
