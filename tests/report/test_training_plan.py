"""The report of a training plan: it fits 80 columns, its parts add up, and terminal and page say the plan's numbers."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from antiphon.report.document import bar, html, rendered
from antiphon.report.training_plan import (
    LOSER_COLUMNS,
    facts,
    fits,
    hidden_summary,
    loser_row,
    memory_chart,
    memory_summary,
    mfu_chart,
    other_strategies,
    short_sizes,
    single_changes,
    step_chart,
    step_parts,
    training_page,
    training_pieces,
)
from antiphon.specs.training_plan import TrainingPlan, training_plan_from_json
from tests.specs.training_specimen import LAYOUT, PLAN, PREDICTED


def printed(plan: TrainingPlan, width: int, *, explain: bool) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for item in rendered(training_pieces(plan, explain=explain)):
            console.print(item, markup=False)
    return captured.get()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("explain", [False, True])
def test_it_fits(width: int, explain: bool) -> None:
    lines = printed(PLAN, width, explain=explain).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)


def test_it_says_the_answer() -> None:
    text = " ".join(printed(PLAN, 160, explain=False).split())
    assert "some-moe on nodes, training: 30 sequences of 4,096 tokens a step, 122,880 tokens; 25 H800 offered" in text
    assert "SP+EP over 4 devices, 3 stages of 2 virtual stages each, 2 copies: 10.0 s a step, 12,288 tokens/s" in text
    assert "MFU 32.0%" in text
    assert "made again in backward ln1_out (norm before attention), fc2_in (experts' activation)" in text
    assert "gradients sent in BF16, summed in FP32" in text
    assert "all-to-all, a row per expert of a token" in text
    assert "work ████████████████···· 8.25 s 82.5%" in text
    assert "pipeline bubble ██·················· 1.00 s 10.0%" in text
    assert "layers exchange rows for 2.00 s, 75% of it hidden" in text
    assert "Memory of the fullest device: 60.0 GB of the 72.0 GB that can be used, 83.3%" in text
    assert "gradients ██████·············· 20.0 GB 27.8%" in text
    assert "TP+TP n4 p3 d2 b1 12.5 s 9,830 25.6% 0.80 ×" in text
    assert "SP+TP: cannot be run: no degree of parallelism has a head for every device" in text
    assert "note: 1 of 25 devices stay idle" in text


def test_explain_adds_single_changes_and_the_search() -> None:
    short, long = printed(PLAN, 120, explain=False), printed(PLAN, 120, explain=True)
    for words in (
        "one thing changed",
        "without overlap",
        "lacks 7.5 GiB",
        "1,234 candidates considered in 0.25 s",
    ):
        assert words in long
        assert words not in short


def test_alternatives_are_other_strategies_or_single_changes() -> None:
    assert [rejected.name for rejected in other_strategies(PLAN)] == ["TP+TP", "SP+TP"]
    assert [rejected.name for rejected in single_changes(PLAN)] == ["without overlap", "nothing made again"]
    assert [fits(rejected) for rejected in PLAN.rejected] == [True, False, True, False]


def test_what_does_not_fit_has_no_rate() -> None:
    row = dict(zip(LOSER_COLUMNS, loser_row(PLAN.rejected[3], PLAN), strict=True))
    assert (row["sizes"], row["step"], row["tokens/s"], row["MFU"]) == ("n4 p3x2 d2 b1", "-", "-", "-")
    assert row["why it lost"].startswith("does not fit")
    assert loser_row(PLAN.rejected[1], PLAN)[1] == "-"


def test_the_parts_of_a_step_add_up() -> None:
    parts = step_parts(PREDICTED)
    assert sum(parts.values()) == pytest.approx(PREDICTED.iteration_s)
    assert parts["exposed exchanges in layers"] == 0.5


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"pipeline": 1, "virtual_stages": 1}, "pipeline", "no pipeline"),
        ({"pipeline": 3, "virtual_stages": 1}, "pipeline", "3 stages"),
        ({"data_parallel": 1}, "data parallel", "1 copy"),
        ({"micro_batch": 2, "num_micro_batches": 15}, "micro-batches", "15 of 2 sequences"),
        ({"rematerialized": ()}, "made again in backward", "nothing"),
        ({"rematerialized": ("router",)}, "made again in backward", "router"),
        ({"deduplicate": True}, "dispatch to experts", "all-to-all, a token once per device"),
        ({"dispatch": "all_gather"}, "dispatch to experts", "all-gather, back by reduce-scatter"),
        ({"experts": "tensor"}, "experts", "TP over 4 devices (tensor parallel)"),
        ({"attention": "tensor"}, "attention", "TP over 4 devices (tensor parallel)"),
        ({"model_parallel": 1}, "attention", "whole on each device"),
        ({"model_parallel": 1}, "dispatch to experts", "nothing is sent"),
        ({"zero": 0}, "sharded over copies", "nothing is sharded (ZeRO stage 0)"),
        ({"zero": 3}, "sharded over copies", "all states and parameters (ZeRO stage 3)"),
        ({"overlap": "none"}, "overlap", "none"),
        ({"activation_wire": "fp8"}, "rows sent in", "FP8"),
    ],
)
def test_facts_of_the_layout(changes: dict[str, Any], name: str, value: str) -> None:
    assert dict(facts(replace(PLAN, layout=replace(LAYOUT, **changes))))[name] == value


def test_layers_that_are_not_divided() -> None:
    text = printed(replace(PLAN, layout=replace(LAYOUT, model_parallel=1)), 120, explain=False)
    assert "Train: layers whole on each device, 3 stages" in text


def test_a_plan_that_says_little_still_has_a_report() -> None:
    bare = replace(
        PLAN, predicted=replace(PREDICTED, memory_bytes={}, bound_by="", communication_s=0.0), rejected=(), notes=()
    )
    text = printed(bare, 80, explain=True)
    assert "Memory of" not in text
    assert "Other ways" not in text
    assert "layers exchange nothing" in " ".join(text.split())
    assert memory_summary(bare) == ""
    assert dict(facts(bare))["step waits for"] == "unknown"
    assert 'id="train-memory"' not in html(training_page(bare))


def test_sizes_in_a_few_columns() -> None:
    assert short_sizes(LAYOUT) == "n4 p3x2 d2 b1"
    assert short_sizes(replace(LAYOUT, virtual_stages=1)) == "n4 p3 d2 b1"


@pytest.mark.parametrize(("share", "filled"), [(-0.1, 0), (0, 0), (0.02, 0), (0.5, 10), (1, 20), (1.2, 20)])
def test_bars_are_in_proportion(share: float, filled: int) -> None:
    assert bar([share]) == "█" * filled + "·" * (20 - filled)


def test_hidden_communication_is_a_share_of_all() -> None:
    assert hidden_summary(replace(PREDICTED, exposed_s=2.0)) == "layers exchange rows for 2.00 s, 0% of it hidden"


def element(page: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def page() -> str:
    return html(training_page(PLAN))


def test_the_plan_is_in_the_page(page: str) -> None:
    assert training_plan_from_json(element(page, "plan")) == PLAN
    assert "antiphon serve" not in page.partition("<footer>")[2]
    assert "default-src 'none'" in page


def test_charts_are_the_plans_numbers(page: str) -> None:
    for name in ("train-step", "train-memory", "train-mfu"):
        assert page.count(f'id="{name}"') == 1
    step, memory, mfu = (chart(PLAN).blocks for chart in (step_chart, memory_chart, mfu_chart))
    assert sum(block.length for block in step) == pytest.approx(PREDICTED.iteration_s)
    assert {block.group: block.length for block in memory}["free"] == pytest.approx(12.0)
    assert sum(block.length for block in memory) == pytest.approx(72.0)
    assert [block.row for block in mfu] == ["plan: SP+EP", "TP+TP", "without overlap"]
    assert [block.length for block in mfu] == pytest.approx([32.0, 25.6, 29.0])


def test_every_alternative_is_in_the_pages_table(page: str) -> None:
    words = page.replace("&#39;", "'").replace("\u00a0", " ")
    for rejected in PLAN.rejected:
        assert f"<td>{rejected.name}</td>" in words
        assert rejected.reason in words
    for _, value in facts(PLAN):
        assert value in words


def test_names_cannot_break_the_page() -> None:
    nasty = "</script><b>x</b>"
    page = html(training_page(replace(PLAN, model=nasty)))
    assert nasty not in page
    assert element(page, "plan")["model"] == nasty
