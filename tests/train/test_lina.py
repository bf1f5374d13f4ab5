"""Lina's switches in whole runs on four ranks: the losses of a run without them, the same bits every time, and what
decisions about packing do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.measured_choices import Packing
from antiphon.train.optimizer import shards_of
from antiphon.train.ranks import sizes_of
from antiphon.train.setup import build_model, parts_of, prepare
from antiphon.train.trainer import Trainer
from tests.comm.ranks import begin_anew, on_ranks
from tests.train.harness import config_of, write_run
from tests.train.test_run_parallel import metrics_of

RANKS = 4
SHARED = ("steps=4", "micro_batch=4", "optimizer.schedule=constant", "output.save_beside=false")
FORM = ("parallel.expert=4", "parallel.sequence=2", "parallel.zero=1")
PRIORITY = "communication.sums=priority"
PARTITION = ("communication.partition=true", "communication.chunk_bytes=2000")
PIPELINE = "communication.pipeline_experts=true"
SWITCHES: dict[str, tuple[str, ...]] = {
    "behind": (),
    "baseline": ("communication.sums=baseline",),
    "between": ("communication.sums=between",),
    "priority": (PRIORITY,),
    "partition": (PRIORITY, *PARTITION),
    "pipeline": (PRIORITY, *PARTITION, PIPELINE),
    "again": (PRIORITY, *PARTITION, PIPELINE),
    "pipeline alone": (PIPELINE, PARTITION[1]),
    "nothing beside": ("overlap.beside=false",),
    "parts, nothing beside": (PIPELINE, PARTITION[1], "overlap.beside=false"),
}
OF_PASSES = {  # two a step
    "two passes": ("micro_batch=2",),
    "two in turns": ("micro_batch=2", "overlap.pairs=true"),
}
OF_SHARDS = {
    "zero 2": ("communication.sums=baseline", "parallel.zero=2"),
    "zero 3": (PRIORITY, *PARTITION, PIPELINE, "parallel.zero=3", "parallel.dispatch=auto"),
}
PACKED = (PRIORITY, *PARTITION, PIPELINE, "communication.packing=true")
DECISIONS = [
    {"step": 2, "expert": 2, "ffn_s": 1.0, "all_to_all_s": 9.0},
    {"step": 3, "expert": 1, "ffn_s": 1.0, "all_to_all_s": 2.0},
]


def run(file: Path, *changes: str) -> None:
    Trainer(prepare(read_config(file, (*SHARED, *FORM, *changes)))).run()


def all_runs(files: dict[str, str], rank: int) -> None:
    """One run a switch; one that packs its experts, and the same steps as three runs with other sizes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    for name, changes in (SWITCHES | OF_PASSES | OF_SHARDS).items():
        run(Path(files[name]), *changes)
        begin_anew()
    run(Path(files["packed"]), *PACKED)
    for steps, expert in ((2, 4), (3, 2), (4, 1)):
        sizes = (f"steps={steps}", f"parallel.expert={expert}")
        pipeline = (PIPELINE,) if expert > 1 else ()
        begin_anew()
        run(Path(files["by hand"]), PRIORITY, *PARTITION, *pipeline, *sizes)


@pytest.fixture(scope="module", params=[pytest.param("all", marks=pytest.mark.slow)])
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The metrics of each run, a line a step."""
    folder = tmp_path_factory.mktemp("runs")
    names = [*SWITCHES, *OF_PASSES, *OF_SHARDS, "packed", "by hand"]
    files = {name: write_run(folder / name) for name in names}
    (folder / "packed" / "out").mkdir()
    (folder / "packed" / "out" / "packing.json").write_text(json.dumps(DECISIONS))
    on_ranks(RANKS, folder, Work({name: str(file) for name, file in files.items()}))
    return {name: metrics_of(folder / name) for name in files}


class Work:
    """`all_runs` of these files."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def __call__(self, rank: int) -> None:
        all_runs(self.files, rank)


def losses(run: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in run]


def test_losses_are_those_without_a_switch(runs: dict[str, list[dict[str, Any]]]) -> None:
    for name in runs.keys() & {*SWITCHES, *OF_SHARDS, "packed"}:
        assert losses(runs[name]) == pytest.approx(losses(runs["behind"]), rel=1e-5), name
        norms = [line["gradient_norm"] for line in runs[name]]
        assert norms == pytest.approx([line["gradient_norm"] for line in runs["behind"]], rel=1e-4), name


def test_the_same_bits_every_time(runs: dict[str, list[dict[str, Any]]]) -> None:
    assert losses(runs["again"]) == losses(runs["pipeline"])


def test_two_passes_in_turns_are_two_passes(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Bit for bit: of two, either order of adding gradients gives the same sum."""
    assert losses(runs["two in turns"]) == losses(runs["two passes"])
    held = {name: runs[name][0]["activation_bytes"] for name in ("two passes", "two in turns")}
    assert held["two in turns"] > 1.5 * held["two passes"], "both are under way at once"
    assert runs["two in turns"][0]["collective_bytes"] == runs["two passes"][0]["collective_bytes"]


def test_no_switch_changes_what_is_sent(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Pieces of a sum are padded by less than a number each."""
    expected = runs["behind"][0]["collective_bytes"]
    for name in runs.keys() & SWITCHES.keys():
        found = runs[name][0]["collective_bytes"]
        assert found.keys() == expected.keys(), name
        for kind, num_bytes in found.items():
            assert num_bytes == pytest.approx(expected[kind], rel=0.02 if kind.startswith("gradients") else 1e-9), name


def test_packed_training_goes_on_bit_by_bit(runs: dict[str, list[dict[str, Any]]]) -> None:
    """A run that moves its experts twice has the losses of one that is stopped, and goes on from its checkpoint with
    other sizes: parameters and moments were moved whole."""
    assert losses(runs["packed"]) == losses(runs["by hand"])
    assert runs["packed"][3]["collective_bytes"].get("dispatch.all_to_all", 0) == 0, "every rank has all experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("communication.chunk_bytes=0",), r"communication.chunk_bytes is 0: it must be at least 8"),
        (("communication.chunk_bytes=7",), r"communication.chunk_bytes is 7: it must be at least 8"),
        (("communication.partition=true",), r"partition is true and sums is 'behind', where nothing runs beside"),
        (("communication.packing=true",), r"packing is true and sums is 'behind'.*only sums 'priority' takes"),
        (
            (PRIORITY, "communication.packing=true", "parallel.dispatch=auto"),
            r"packing is true and parallel.dispatch is",
        ),
        (("overlap.pairs=true",), r"overlap.pairs is true and micro_batch leaves 1 pass a step"),
        (("overlap.pairs=true", "micro_batch=1", "parallel.zero=3"), r"pairs is true and parallel.zero is 3"),
        (("communication.activations=float8_permutation", "parallel.dispatch=auto"), r"auto, which has none or may"),
        ((PRIORITY, "communication.packing=true", "overlap.search=true"), r"leave out overlap.schedule and overlap"),
    ],
)
def test_switches_that_do_not_fit(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, *changes)


def test_packing_that_does_not_divide(tmp_path: Path) -> None:
    config = config_of(tmp_path, PRIORITY, "communication.packing=true", "parallel.expert=3")
    with pytest.raises(UserError, match=r"parallel.expert is 3: packing halves it, so make it even"):
        Packing(config, load_model_spec(Path(config.model.path)))


def test_packing_decides_on_measured_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a time of an exchange decides nothing; with all experts on a rank nothing is left to decide."""
    config = config_of(tmp_path, PRIORITY, "communication.packing=true", "parallel.expert=4")
    Path(config.output.folder).mkdir(parents=True)
    packing, mesh = Packing(config, load_model_spec(Path(config.model.path))), connect(Sizes(), 0)
    monkeypatch.setattr(packing, "_fits", lambda expert: True)
    packing.observe({"fc1": 1.0}, {})
    assert packing.decide(10, mesh) == 4
    assert not packing._known
    assert packing.is_measured(11)
    for step, expert in ((14, 2), (18, 1)):
        packing.observe({"fc1": 1.0}, {"dispatch.all_to_all": [9.0], "combine.all_to_all": [9.0]})
        assert packing.decide(step, mesh) == expert
    assert not packing.is_measured(19)
    assert packing.decide(22, mesh) == 1
    assert [each.all_to_all_s for each in packing._known] == [9.0, 9.0]


def test_the_former_name_of_the_baseline_is_read(tmp_path: Path) -> None:
    assert config_of(tmp_path, "communication.sums=fixed").communication.sums == "baseline"


def test_a_chunk_holds_gradients_of_one_urgency(tmp_path: Path) -> None:
    """The head's gradients, which are ready first, share no bucket with the embedding's, which are ready last."""
    config = config_of(tmp_path)
    model = build_model(load_model_spec(Path(config.model.path)), config, 16)
    shards = shards_of(model, 1, config.optimizer, config.communication)
    urgent = [{piece.name.partition(".")[0] for piece in bucket.pieces} for bucket in shards._outer]
    assert sorted(map(sorted, urgent)) == [["embedding"], ["final_norm", "head"]]
    assert [bucket.is_of_loss for bucket in shards._outer].count(True) == 1


def test_pipelined_experts_that_no_rows_reach(tmp_path: Path) -> None:
    config = config_of(tmp_path, PIPELINE)
    spec = load_model_spec(Path(config.model.path))
    with pytest.raises(UserError, match=r"pipeline_experts is true, but every rank has all experts"):
        parts_of(spec, config, sizes_of(config, spec, 2))


def parts(folder: Path, *changes: str) -> int:
    config: TrainConfig = config_of(folder, PIPELINE, *changes)
    spec = load_model_spec(Path(config.model.path))
    return parts_of(spec, config, sizes_of(config, spec, RANKS))


def test_number_of_parts(tmp_path: Path) -> None:
    """Of rows of 128 bytes: 16 tokens a rank, of which each goes to two ranks at most."""
    assert parts(tmp_path / "a", "parallel.expert=4", "communication.chunk_bytes=1000") == 5
    assert parts(tmp_path / "b", "parallel.expert=4", "communication.chunk_bytes=4096") == 1
    assert parts(tmp_path / "c", "parallel.expert=4", "parallel.sequence=4", "communication.chunk_bytes=4095") == 2
    assert parts(tmp_path / "d", "parallel.expert_tensor=2", "communication.chunk_bytes=4096") == 1
