"""`parallel.dispatch = "auto"`: one choice on all ranks, kept by a run that goes on, none where none is needed."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import model_spec
from antiphon.train.config import TrainConfig
from antiphon.train.measured_choices import WAYS, choose_dispatch, with_choice
from tests.comm.ranks import on_ranks
from tests.train.harness import CONFIG, config_of


def choices(config: TrainConfig, rank: int) -> list[Any]:
    """Of a first run, and of one that finds in `run.json` the slower way of the first."""
    spec, mesh = model_spec(CONFIG), connect(Sizes(world_size=4, expert=4), rank, 60)
    first = choose_dispatch(spec, config, mesh)
    assert first is not None
    slower = max(first.times_s, key=lambda way: first.times_s[way])
    if rank == 0:
        facts = Path(config.output.folder) / "run.json"
        facts.parent.mkdir(parents=True, exist_ok=True)
        facts.write_text(json.dumps({"dispatch": asdict(replace(first, way=slower))}))
    again = choose_dispatch(spec, config, mesh)
    other = choose_dispatch(spec, replace(config, sequence_length=8), mesh)
    assert again is not None
    assert other is not None
    return [first.way, first.times_s, slower, again.way, bool(other.times_s)]


def test_all_ranks_choose_the_faster_way_and_keep_it(tmp_path: Path) -> None:
    """Over two levels is one of the ways where ranks that share experts are on several nodes."""
    config = config_of(tmp_path, "parallel.dispatch=auto", "parallel.expert=4", "communication.node_size=2")
    ours, *others = on_ranks(4, tmp_path, partial(choices, config))
    assert all(each == ours for each in others)
    way, times_s, slower, again, measured_anew = ours
    assert tuple(times_s) == WAYS
    assert times_s[way] == min(times_s.values()) > 0
    assert again == slower
    assert measured_anew


@pytest.mark.parametrize("changes", [{"dispatch": "auto"}, {"dispatch": "gather_scatter"}])
def test_one_process_measures_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_of(tmp_path)
    config = replace(config, parallel=replace(config.parallel, **changes))
    assert choose_dispatch(model_spec(CONFIG), config, connect(Sizes(), 0)) is None
    assert with_choice(config, None).parallel.dispatch != "auto"
