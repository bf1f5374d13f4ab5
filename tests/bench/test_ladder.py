"""Ladders: what passes a link, what is predicted, what is refused, and one that runs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import ResourceError, UserError
from antiphon.bench.box import box_unavailable
from antiphon.bench.ladder_prediction import BoxLinks, exchanges, predicted_step_s, sums_s
from antiphon.bench.ladder_variants import LADDERS, LadderCase, variants_of
from antiphon.bench.training_ladder import VariantRecord, check_losses, check_room, configuration, draw, timed_steps
from antiphon.cli.main import app
from antiphon.comm.mesh import Sizes
from antiphon.models.config import load_model_spec
from antiphon.train.layer_plan import LayerPlan
from antiphon.train.memory import setup_of
from antiphon.train.row_budget import part_over_budget
from antiphon.train.setup import build_model

DEMO = Path("examples/demo-moe")
ROW = {"variant": "A & B", "step_s_median": 2.0, "exposed_comm_s": 0.5, "predicted_step_s": 1.9}


def case(**values: object) -> LadderCase:
    defaults = {"folder": DEMO, "ladder": "msm", "nodes": 2, "ranks_per_node": 2, "mbit": 100.0}
    return LadderCase(
        **defaults | {"batch": 4, "sequence_length": 32, "dtype": "float32", "rounds": 1} | values  # type: ignore[arg-type]
    )


def test_a_case_names_its_ladder() -> None:
    with pytest.raises(TypeError, match="ladder"):
        LadderCase(folder=DEMO, batch=4, sequence_length=32, dtype="float32", rounds=1)  # type: ignore[call-arg]


def test_what_leaves_a_node() -> None:
    links = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=1.0)
    # Of an all-to-all two of three parts leave, of two ranks; of an all-gather, a ring, one rank's bytes.
    assert links.seconds("all_to_all", [[0, 1, 2, 3]], 3.0) == pytest.approx(4.0)
    assert links.seconds("reduce_scatter", [[0, 1, 2, 3]], 3.0) == pytest.approx(4.0)
    assert links.seconds("all_gather", [[0, 1, 2, 3]], 3.0) == pytest.approx(3.0)
    assert links.seconds("all_gather", [[0, 1], [2, 3]], 3.0) == 0.0
    assert links.seconds("all_to_all", [[0, 2], [1, 3]], 3.0) == pytest.approx(6.0)
    alone = BoxLinks(nodes=4, ranks_per_node=1, bytes_per_s=1.0)
    assert alone.seconds("all_to_all", [[0, 1, 2, 3]], 3.0) == pytest.approx(3.0)


def test_exchanges_are_those_of_the_formulas() -> None:
    """MegaScale-MoE, eq. 1 to 4: of b s h numbers, halves for each of two exchanges."""
    spec, rows = load_model_spec(DEMO), 4 * 32
    sizes = Sizes(world_size=4, tensor=4, expert_tensor=4)
    tensor, sequence, _ = (configuration(case(), each, 0, Path("/nowhere")) for each in variants_of(case())[:3])
    found = exchanges(spec, tensor, sizes)
    whole = rows * spec.hidden_size * 4
    assert found["tensor_gather"].forward_bytes == pytest.approx(whole * 3 / 4)
    assert found["dispatch"].forward_bytes == pytest.approx(whole * 3 / 4)
    links = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=1.0)
    for name, there, back in (("dispatch", 1.0, 4 / 3), ("combine", 4 / 3, 1.0)):  # an all-gather is undone by sums
        assert found[name].seconds(links, sizes, backward=False) == pytest.approx(there * whole * 3 / 4)
        assert found[name].seconds(links, sizes, backward=True) == pytest.approx(back * whole * 3 / 4)
    found = exchanges(spec, sequence, Sizes(world_size=4, sequence=4, expert=4))
    assert found["rows_a2a"].forward_bytes == pytest.approx(whole * 3 / 16)
    assert found["heads_a2a"].forward_bytes == pytest.approx(whole * 3 / 16 * 2)  # two queries share keys and values
    assert "dispatch_2" not in found
    assert "tensor_gather" not in found


def test_without_a_wire_a_prediction_is_the_sum_of_operators() -> None:
    spec = load_model_spec(DEMO)
    config = configuration(case(), variants_of(case())[2], 0, Path("/nowhere"))
    sizes = Sizes(world_size=4, sequence=4, expert=4)
    plans: list[LayerPlan] = [layer.plan for layer in build_model(spec, config, 32).layers]
    fast = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=float("inf"))
    operator_s = {"optimizer": 1.0, "gradient sum": 9.0, "ln1": 2.0, "ln1 backward": 3.0, "wait for tensor_gather": 9.0}
    found = predicted_step_s(spec, config, sizes, plans, operator_s, fast)
    assert found == pytest.approx(1.0 + 2.0 + 3.0)
    slow = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=1e6)
    sums = sums_s(spec, config, setup_of(config, sizes), sizes, slow)
    assert sums > 0
    behind = replace(config, communication=replace(config.communication, sums="behind"))
    after_s = predicted_step_s(spec, behind, sizes, plans, operator_s, slow)
    assert after_s >= found + sums
    assert found < predicted_step_s(spec, config, sizes, plans, operator_s, slow) < after_s, "sums run beside backward"


def test_rows_over_the_budget_are_as_narrow_as_others() -> None:
    """They travel inside an operator; what it computes is the same."""
    spec, chosen = load_model_spec(DEMO), case(ladder="compression")
    sizes, found, travels_s = Sizes(world_size=4, expert=4), dict[str, float](), dict[str, float]()
    fast = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=float("inf"))
    operator_s = {"over_budget": 1.0, "waits in over_budget": 3.0, "waits in over_budget backward": 5.0}
    for variant in variants_of(chosen)[1:6]:
        config = configuration(chosen, variant, 0, Path("/nowhere"))
        config = replace(config, parallel=replace(config.parallel, row_budget=0.5))  # one process may exceed it
        plans = [layer.plan for layer in build_model(spec, config, 32).layers]
        slow = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=1e5)
        none, some = (predicted_step_s(spec, config, sizes, plans, operator_s, slow, over) for over in (0.0, 0.2))
        found[variant.name] = none - some
        assert predicted_step_s(spec, config, sizes, plans, operator_s, fast, 0.2) == pytest.approx(9.0)
        rows = [each for each in exchanges(spec, config, sizes).values() if each.axes == ("expert",)]
        there_s, back_s = (sum(each.seconds(slow, sizes, backward=back) for each in rows) for back in (False, True))
        travels_s[variant.name] = 0.2 * spec.num_layers * (2 * there_s + back_s)  # backward they go there again
    plain, narrow = "gradients in BF16", "+ rows in FP8"
    assert found[plain] == pytest.approx(0.0), "it waits as it was measured to"
    assert found[narrow] == pytest.approx(travels_s[plain] - travels_s[narrow])
    assert travels_s[narrow] < 0.3 * travels_s[plain]


def test_the_part_of_rows_over_the_budget() -> None:
    assert part_over_budget([10, 10, 10, 10], 2, 1.1) == 0.0
    assert part_over_budget([20, 20, 0, 0], 2, 0.0) == part_over_budget([40, 0], 1, 1.1) == 0.0
    assert part_over_budget([20, 20, 0, 0], 2, 1.1) == pytest.approx((40 - 0.75 * 1.1 * 20) / 40)


def test_sums_beside_backward_hide() -> None:
    """By the simulator: what the order of the wire gains, on links where nothing is free."""
    spec, chosen = load_model_spec(DEMO), case(ladder="lina", rounds=20, mbit=20.0)
    sizes, found = Sizes(world_size=4, expert=4), {}
    links = BoxLinks(nodes=2, ranks_per_node=2, bytes_per_s=20e6 / 8)
    operator_s = {"total backward": 0.02, "fc1 backward": 0.05, "attention backward": 0.2}
    for variant in variants_of(chosen)[1:6]:
        config = configuration(chosen, variant, 0, Path("/nowhere"))
        plans = [layer.plan for layer in build_model(spec, config, 32).layers]
        found[variant.name] = predicted_step_s(spec, config, sizes, plans, operator_s, links)
    assert found["+ partition"] <= found["priority"]
    assert found["+ pipeline"] <= found["+ partition"]


def test_ladders_are_runs_of_the_trainer(tmp_path: Path) -> None:
    for ladder in LADDERS:
        chosen = case(ladder=ladder, rounds=20)
        for number, variant in enumerate(variants_of(chosen)):
            assert configuration(chosen, variant, number, tmp_path).batch == 4
    sizes = [
        each.tables["communication"].get("chunk_bytes") for each in variants_of(case(ladder="chunks", mbit=1e4))[:-1]
    ]
    assert sizes == [3_000_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000], "a tenth of the paper's links"
    plain, selective, full, used = (
        configuration(case(ladder="memory"), each, 0, tmp_path).memory for each in variants_of(case(ladder="memory"))
    )
    assert (plain.remake, selective.remake, full.remake) == ("none", "selective", "full")
    assert used.reuse_rows
    assert not plain.reuse_rows
    names = [each.name for each in variants_of(case(ladder="compression", nodes=4, ranks_per_node=1))]
    assert "+ by levels" not in names  # one rank a node has none


def test_some_variants_run_beside_the_first() -> None:
    few = variants_of(case(ladder="lina", variants="priority;+ partition"))
    assert [each.name for each in few] == ["nothing beside", "priority", "+ partition"]
    with pytest.raises(
        UserError, match=r"--variants names 'prioritty', which the ladder lina lacks: did you mean prio"
    ):
        variants_of(case(ladder="lina", rounds=20, variants="prioritty"))


def test_variants_that_do_not_fit_beside_each_other_are_refused() -> None:
    every = case(ladder="chunks", ranks_per_node=1)
    with pytest.raises(
        ResourceError, match=r"variants of the ladder chunks need .* in 2 ranks, all at once, .* --vari"
    ):
        check_room(every, Path("/nowhere"), free_bytes=600 << 20)
    check_room(replace(every, variants="whole sums"), Path("/nowhere"), free_bytes=600 << 20)


def test_steps_that_decide_are_not_timed() -> None:
    chosen = case(ladder="packing", rounds=20)
    assert [timed_steps(chosen, each) for each in variants_of(chosen)] == [slice(2, 22), slice(2, 22), slice(14, 22)]


def test_a_variant_that_trains_otherwise_is_refused() -> None:
    variants = variants_of(case())[:2]
    check_losses(variants, [VariantRecord(losses=[8.0]), VariantRecord(losses=[8.0001])])
    with pytest.raises(AssertionError, match=r"SP \+ EP is 8\.1"):
        check_losses(variants, [VariantRecord(losses=[8.0]), VariantRecord(losses=[8.1])])


def test_figure_is_well_formed() -> None:
    drawn = draw([ROW | {"step_s_median": 1.09}, ROW | {"predicted_step_s": None}], "msm <box>")
    ElementTree.fromstring(drawn)
    assert [f"{tick} s" for tick in ("0", "0.5", "1", "1.5", "2")] == re.findall(r">([\d.]+ s)<", drawn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ladder", "none"], "use chunks, compression, lina, marks, memory, msm, packing, pairs, tensor"),
        (["--ladder", "msm", "--rank-cores", "9"], "--rank-cores is 9 for 4 ranks, this process may use"),
        (["--rank-cores", "0.5"], "only a ladder"),
        (["--ladder", "msm", "--nodes", "1", "--ranks-per-node", "1"], "two ranks"),
        (["--ladder", "msm", "--batch", "5"], "cannot share"),
        (["--ladder", "packing", "--rounds", "5"], "more than 14 --rounds"),
        (["--ladder", "packing", "--nodes", "3", "--ranks-per-node", "1", "--rounds", "20"], "give an even number"),
        (["--ladder", "msm", "--ranks", "2"], "leave them out"),
        (["--mbit", "10"], "only a ladder"),
        (["--ladder", "msm", "--ranks-per-node", "1", "--inner-mbit", "9"], "no links inside a node"),
    ],
)
def test_bad_options(options: list[str], words: str) -> None:
    ended = CliRunner().invoke(app, ["bench", "train", str(DEMO), *options])
    assert ended.exception is not None
    assert words in str(ended.exception)


@pytest.mark.slow
def test_a_ladder_runs(tmp_path: Path) -> None:
    if reason := box_unavailable():
        pytest.skip(reason)
    file, figure = tmp_path / "rows.json", tmp_path / "ladder.svg"
    options = ["--ladder", "msm", "--nodes", "2", "--ranks-per-node", "1", "--mbit", "1000", "--rounds", "1"]
    options += ["--batch", "2", "--sequence-length", "16", "--json", str(file), "--figure", str(figure)]
    ended = CliRunner().invoke(app, ["bench", "train", str(DEMO), *options])
    assert ended.exception is None
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows][-2:] == ["DDP", "FSDP2"]
    assert [row["before_to_this"] is None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert all(row["processor_s"] > 0 for row in rows)
    assert all(row["step_s_median"] > 0 and row["comm_bytes"] > 0 for row in rows)
    ElementTree.parse(figure)
