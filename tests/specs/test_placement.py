"""Which worker holds which experts: runs, copies, a worker that is gone, files, the errors of impossible maps."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.placement import (
    ExpertPlacement,
    Owners,
    contiguous_placement,
    placement_from_json,
    placement_to_json,
    read_placement,
)


@given(st.integers(1, 64).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))))
def test_contiguous_runs_cover_all_experts_once(sizes: tuple[int, int]) -> None:
    num_experts, num_workers = sizes
    placement = contiguous_placement(num_experts, num_workers, [1, 3])
    runs = [placement.experts_of(worker)[3] for worker in range(num_workers)]
    assert [expert for run in runs for expert in run] == list(range(num_experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert placement.most_held() == max(map(len, runs))
    assert list(placement.owners) == [1, 3]


def test_layers_differ_and_a_copy_is_held_by_both_owners() -> None:
    placement = ExpertPlacement(2, {0: ((0, 1), (1,), (0,)), 2: ((0,), (0,), (0,))})
    assert placement.experts_of(0) == {0: (0, 2), 2: (0, 1, 2)}
    assert placement.experts_of(1) == {0: (0, 1), 2: ()}
    assert placement.most_held() == 3


def test_without_a_worker_its_copies_are_gone() -> None:
    placement = ExpertPlacement(3, {0: ((0, 1), (0, 1), (0, 2))}, version=4)
    assert placement.without([1]) == ExpertPlacement(3, {0: ((0,), (0,), (0, 2))}, version=4)
    assert placement.without([1, 2]) is not None
    assert placement.without([0, 1]) is None


@pytest.mark.parametrize("workers", [0, 5])
def test_too_many_or_no_workers(workers: int) -> None:
    with pytest.raises(UserError, match=f"^{workers} expert workers for 4 experts: use 1 to 4$"):
        contiguous_placement(4, workers, [0])


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (((0,), ()), "expert 1 of layer 7 is placed on no worker: give it at least one of 0..1"),
        (((0,), (1, 1)), r"expert 1 of layer 7 is placed on \[1, 1\]: use distinct workers from 0 to 1"),
        (((0,), (2,)), r"expert 1 of layer 7 is placed on \[2\]: use distinct workers from 0 to 1"),
    ],
)
def test_impossible_placements(owners: Owners, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        ExpertPlacement(2, {7: owners})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (([0, 1], 3, 2, 2), "the placement is for layers 0 to 0, this model has experts in 0 to 1"),
        (([0], 4, 2, 2), "the placement has 3 experts in layer 0, this model has 4"),
        (([0], 3, 3, 2), "the placement is for 2 expert workers, 3 run: make one for them"),
        (([0], 3, 2, 1), "puts 2 experts of layer 0 on worker 0, which has 1 slots: .* --expert-slots 2"),
    ],
)
def test_a_placement_must_fit_model_workers_and_slots(sizes: tuple[list[int], int, int, int], message: str) -> None:
    placement = ExpertPlacement(2, {0: ((0, 1), (0,), (1,))})
    placement.check_fits([0], 3, 2, 2)
    with pytest.raises(UserError, match=message):
        placement.check_fits(*sizes)


def test_a_file_holds_it(tmp_path: Path) -> None:
    placement = ExpertPlacement(2, {0: ((0, 1), (1,)), 2: ((0,), (0,))})
    file = tmp_path / "placement.json"
    file.write_text(placement_to_json(placement))
    assert read_placement(file) == placement
    with pytest.raises(UserError, match="No such file or directory"):
        read_placement(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"num_workers": 1}',
        '{"num_workers": 1, "owners": {"a": [[0]]}}',
        '{"num_workers": 1, "owners": {"0": [["0"]]}}',
        '{"num_workers": 1, "owners": {}, "more": 1}',
        '{"num_workers": 2, "owners": {"0": [[0]], "0": [[1]]}}',
    ],
)
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^the body is no placement: .*: write {"):
        placement_from_json(text.encode(), "the body")


@pytest.mark.parametrize("name", ["01", "-1", " 1", "1_0", "a", "٣"])
def test_a_layer_is_named_in_one_way(name: str) -> None:
    with pytest.raises(UserError, match="a layer is named"):
        placement_from_json(f'{{"num_workers": 1, "owners": {{"{name}": [[0]]}}}}'.encode(), "x")


def test_workers_speeds_and_knee_are_checked() -> None:
    for changes in ({"num_workers": 0}, {"knee": 0}, {"speeds": (1.0, 0.0)}, {"speeds": (1.0,)}):
        with pytest.raises(UserError, match=r"at least 1|speeds"):
            ExpertPlacement(**{"num_workers": 2, "owners": {}, **changes})  # type: ignore[arg-type]
