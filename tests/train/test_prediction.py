"""What a profile says of a run: every form that planning has, and one line for what it cannot say."""

from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec, read_config
from antiphon.train.config import TrainConfig
from antiphon.train.planned_run import predict_step
from antiphon.train.ranks import sizes_of
from tests.cost.training.specimens import training_profile
from tests.train.harness import config_of

LENGTH = 16
PROFILE = training_profile(LENGTH)
FORMS = {
    "alone": (1, ()),
    "data": (2, ()),
    "data, zero 3": (4, ("parallel.zero=3",)),
    "sequence and expert": (2, ("parallel.sequence=2", "parallel.expert=2")),
    "of four": (4, ("parallel.sequence=4", "parallel.expert=4")),
    "gathered": (2, ("parallel.sequence=2", "parallel.expert=2", "parallel.dispatch=gather_scatter")),
    "tensor": (2, ("parallel.tensor=2", "parallel.expert_tensor=2")),
    "beside data": (4, ("parallel.tensor=2", "parallel.expert=2", "parallel.zero=1")),
    "pipeline": (2, ("parallel.pipeline=2", "micro_batch=1")),
    "in stages": (4, ("parallel.pipeline=2", "parallel.sequence=2", "parallel.expert=2", "micro_batch=1")),
}


def predicted(config: TrainConfig, ranks: int) -> float:
    spec = load_model_spec(Path(config.model.path))
    found = predict_step(spec, config, sizes_of(config, spec, ranks), PROFILE)
    assert found.tokens_per_s == pytest.approx(config.tokens_per_step / found.step_s)
    assert 0 < found.mfu < 1
    assert found.memory.total > 0
    assert set(found.parts_s) == {"layers", "waiting in layers", "bubble", "stages", "sums", "update"}
    return found.step_s


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_a_time(tmp_path: Path, form: str) -> None:
    """The tables are of a machine with two cores, where two ranks halve layers at best."""
    ranks, changes = FORMS[form]
    alone = predicted(config_of(tmp_path / "alone"), 1)
    found = predicted(config_of(tmp_path / form.replace(" ", "-"), *changes), ranks)
    assert alone / 2.2 < found < 2 * alone


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (2, ("parallel.expert=2",), "attention is shared by 1 . 1 ranks, experts by 2 . 1: a prediction needs one way"),
        (4, ("parallel.sequence=2", "parallel.tensor=2", "parallel.expert=4"), "attention is shared by 2 . 2 ranks"),
        (1, ("dtype=bfloat16",), "the profile was measured in float32, dtype is bfloat16: profile it with --dtype"),
        (1, ("sequence_length=8",), "measured with sequences of 16 tokens, not 8: run antiphon profile --phase train"),
        (8, ("batch=8",), "the profile does not cover this form on 8 ranks: it has 1, 2, 4 ranks"),
    ],
)
def test_what_it_cannot_say(tmp_path: Path, ranks: int, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predicted(config_of(tmp_path, *changes), ranks)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    spec = load_model_spec(Path(config.model.path))
    other = replace(PROFILE, model_config=read_config(Path(config.model.path)) | {"num_hidden_layers": 3})
    with pytest.raises(UserError, match="the profile is of another model, with another num_layers: measure this one"):
        predict_step(spec, config, sizes_of(config, spec, 1), other)


def test_another_optimizer_has_its_own_update(tmp_path: Path) -> None:
    slow = replace(
        PROFILE,
        training=replace(PROFILE.training, update={**PROFILE.training.update, "muon": PROFILE.training.step}),  # type: ignore[type-var,union-attr]
    )
    config = config_of(tmp_path, "optimizer.name=muon")
    spec = load_model_spec(Path(config.model.path))
    found = predict_step(spec, config, sizes_of(config, spec, 1), slow)
    assert found.parts_s["update"] > 1.0
