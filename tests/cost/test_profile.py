"""Measured profiles: reading between points, the file and its errors, and the parts they give."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cost.curves import Curve, Surface
from antiphon.cost.profile import (
    AttentionTable,
    ExpertTable,
    MachineFacts,
    MessageTable,
    Profile,
    profiled_attention,
    profiled_experts,
    profiled_messages,
    read_profile,
    read_serving_profile,
)
from antiphon.cost.roofline import Parts
from tests.cost.training.specimens import training_tables

CURVE = Curve((1.0, 2.0, 4.0), (10.0, 12.0, 20.0))
GRID = Surface((1.0, 3.0), (10.0, 20.0), ((1.0, 2.0), (3.0, 8.0)))
TRAINING = training_tables(sequence_length=8)
PROFILE = Profile(
    command="antiphon profile model",
    created="2026-11-21",
    machine=MachineFacts(name="box", num_cores=2, memory_bytes=10**9),
    model="tiny",
    dtype="bfloat16",
    attention=(AttentionTable(phase="decode", layer="moe", times=GRID),),
    experts=(ExpertTable(times=GRID, num_threads=2, bound="compute"),),
    head=CURVE,
    messages=(MessageTable(transport="shm", times=Curve((100.0, 1000.0), (2.0, 4.0))),),
    training=TRAINING,
    step_s=1e-3,
    model_config={"hidden_size": 8},
)


def test_curve_between_below_and_beyond() -> None:
    np.testing.assert_allclose(CURVE.at(np.array([1.0, 1.5, 3.0, 4.0])), [10, 11, 16, 20])
    assert CURVE.at(0.5) == 10, "a fixed cost does not shrink"
    assert CURVE.at(0.0) == 0
    assert CURVE.at(6.0) == 20 + 2 * (20 - 12) / 2, "on with the slope from the middle point to the last"
    assert Curve((5.0,), (3.0,)).at(50.0) == 3


def test_a_ratio_may_fall_and_stays_beyond() -> None:
    falling = Curve((1.0, 4.0, 8.0), (1.0, 7.0, 5.0), may_fall=True)
    assert [falling.value(size) for size in (0.5, 1, 2.5, 4, 6, 8, 20)] == [1.0, 1.0, 4.0, 7.0, 6.0, 5.0, 5.0]


def test_a_dip_in_the_measurements_is_noise() -> None:
    np.testing.assert_allclose(Curve((1.0, 2.0, 3.0), (5.0, 4.0, 6.0)).at(np.array([1.0, 2.0, 2.5])), [5, 5, 5.5])


def test_surface_is_linear_in_each_size() -> None:
    assert GRID.at(1.0, 10.0) == 1
    assert GRID.at(2.0, 15.0) == pytest.approx((1.5 + 5.5) / 2)
    np.testing.assert_allclose(GRID.at(np.array([3.0, 3.0, 0.0]), np.array([20.0, 30.0, 10.0])), [8, 13, 0])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(1, 1e6), min_size=1, max_size=8, unique=True),
    st.lists(st.floats(0, 10), min_size=8, max_size=8),
    st.lists(st.floats(0, 2e6), min_size=2, max_size=20),
)
def test_more_work_is_never_faster(sizes: list[float], seconds: list[float], at: list[float]) -> None:
    curve = Curve(tuple(sorted(sizes)), tuple(seconds[: len(sizes)]))
    times = np.asarray(curve.at(np.array(sorted(at))))
    assert np.all(np.diff(times) >= -1e-9 * (1 + times[:-1]))
    assert np.all(times >= 0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "says"),
    [
        ((), (), "sizes are empty"),
        ((2.0, 1.0), (1.0, 1.0), "they must ascend"),
        ((1.0, 2.0), (1.0,), "2 sizes but 1 times"),
        ((1.0,), (float("nan"),), "at least 0"),
        ((1.0,), (-1.0,), "at least 0"),
    ],
)
def test_impossible_curves(sizes: tuple[float, ...], seconds: tuple[float, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Curve(sizes, seconds)


def test_a_grid_with_a_hole_is_refused() -> None:
    with pytest.raises(UserError, match=r"a grid of 2 x 1 sizes, but times of shape \[1\]"):
        Surface((1.0, 2.0), (1.0,), ((1.0,),))


def write(folder: Path, profile: Profile = PROFILE) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(asdict(profile)))
    return path


def test_file_and_back(tmp_path: Path) -> None:
    assert read_profile(write(tmp_path)) == PROFILE


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile\.json: holds training only: run antiphon profile without --phase"):
        read_serving_profile(write(tmp_path, replace(PROFILE, attention=(), experts=())))
    with pytest.raises(UserError, match=r"holds no training: run antiphon profile --phase train --sequence-length 16"):
        replace(PROFILE, training=None).training_tables(16)
    with pytest.raises(UserError, match="was measured with sequences of 8 tokens, not 16: run antiphon profile"):
        PROFILE.training_tables(16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, ": version is 2: this program reads version 1: make the profile again"),
        ({"extra": 1}, ": unknown key extra: did you mean experts"),
        ({"experts": 3}, ": experts is 3: it must be an array"),
        ({"step_s": "fast"}, ": step_s is 'fast': it must be a valid number"),
        ({"step_s": -1}, "step_s is -1: it must be at least 0"),
        ({"machine": {"name": "box"}}, ": machine.num_cores is missing: add it"),
        ({"head": {"sizes": [2, 1], "seconds": [1, 1]}}, ": head: sizes are [2.0, 1.0]: they must ascend"),
        ({"messages": [{"transport": "shm", "times": None}]}, ": messages[0].times is null: it must be an object"),
        ({"training": {"dtype": "int8"}}, ": training.dtype is 'int8': it must be 'float32'"),
        ({"model": True}, ": model is true: it must be a valid string"),
        ({"head": {"sizes": ["1"], "seconds": [1]}}, ": head.sizes[0] is '1': it must be a valid number"),
        ({"head": {"sizes": [True], "seconds": [1]}}, ": head.sizes[0] is true: it must be a valid number"),
        ({"head": {"sizes": [1], "seconds": [1e31]}}, ": head.seconds[0] is 1e+31: it must be at most 1"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=re.escape(says)) as raised:
        read_profile(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("flops_per_s", 0, "training.flops_per_s is 0: it must be above 0"),
        ("flops_per_s", "16", "training.flops_per_s is '16': it must be a valid number"),
        ("sequence_length", -1, "training.sequence_length is -1: it must be at least 1"),
        ("ranks", [0], "training.ranks[0] is 0: it must be at least 1"),
    ],
)
def test_numbers_of_a_table_are_not_guessed(tmp_path: Path, key: str, value: object, says: str) -> None:
    path = write(tmp_path)
    mapping = json.loads(path.read_text())
    mapping["training"][key] = value
    path.write_text(json.dumps(mapping))
    with pytest.raises(UserError, match=re.escape(says)):
        read_profile(path)


def test_missing_files_and_broken_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json: not valid JSON"):
        read_profile(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=r"list\.json: holds a list: an object is needed"):
        read_profile(tmp_path / "list.json")


def test_tables_are_found_or_not() -> None:
    assert PROFILE.attention_table() is PROFILE.attention[0]
    assert PROFILE.attention_table("prefill") is None
    assert PROFILE.attention_table(tp=2) is None
    assert PROFILE.expert_table() is PROFILE.experts[0]
    assert PROFILE.expert_table(tp=2) is None


def test_parts_of_measured_times() -> None:
    parts = profiled_attention(PROFILE.attention[0], 2.0, 15.0)
    assert parts == Parts(memory_s=pytest.approx(2.5), fixed_s=1.0)
    experts = profiled_experts(PROFILE.experts[0], np.array([20.0, 0.0]), np.array([3.0, 3.0]))
    np.testing.assert_allclose(experts.compute_s, [7.0, 0.0])
    np.testing.assert_allclose(experts.total_s, [8.0, 0.0])
    times = PROFILE.messages[0].times
    messages = profiled_messages(times, 1000.0, 3)
    assert (messages.fixed_s, messages.scale_out_s) == (6.0, 6.0)


def test_impossible_machines() -> None:
    with pytest.raises(UserError, match=r"machine: num_cores is 0"):
        MachineFacts(name="box", num_cores=0, memory_bytes=1)
