"""The words behind `antiphon plan`: targets, prices and formats are read, everything else is refused with a mend."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.cli.plan import rounded_at_load
from antiphon.cli.plan_inputs import (
    SearchOptions,
    parse_precision,
    parse_price,
    parse_target,
    read_inputs,
)
from antiphon.specs.cluster import load_cluster
from antiphon.specs.model import PrecisionSpec
from antiphon.specs.workload import load_workload
from tests.models.gguf_specimens import all_of, write_gguf
from tests.serve.engine_harness import save_tiny_model


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50ms", 0.05), ("0.05", 0.05), (" 2 s ", 2.0), (".5s", 0.5), ("150 MS", 0.15), ("none", None), ("1e-3", 1e-3)],
)
def test_targets(text: str, seconds: float | None) -> None:
    assert parse_target("--slo-tpot", text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["fast", "", "-1", "50us", "nan", "inf", "1,5", "ms", "1e400"])
def test_targets_that_say_nothing(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--slo-tpot is {text!r}: ")):
        parse_target("--slo-tpot", text)


@pytest.mark.parametrize("text", ["0", "0ms", "0.0 s"])
def test_a_target_of_nothing(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--slo-ttft is {text!r}: it must be above 0")):
        parse_target("--slo-ttft", text)


def test_prices() -> None:
    assert parse_price("H20=1.85") == ("H20", 1.85)
    assert parse_price(" L40S = 2 ") == ("L40S", 2.0)


@pytest.mark.parametrize("text", ["H20", "H20=", "=3", "H20=cheap", "H20=0", "H20=-1", "H20=nan", "H20=inf"])
def test_prices_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"write a device and a price above 0, for example H20=1\.85"):
        parse_price(text)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], PrecisionSpec()),
        (["fp8"], PrecisionSpec(weights="fp8", kv="fp8", dispatch="fp8", combine="fp8", compute="fp8")),
        (["weights=fp8", "compute=fp8"], PrecisionSpec(weights="fp8", compute="fp8")),
        (["nvfp4", "compute=fp4"], PrecisionSpec(weights="nvfp4", compute="fp4")),
        (["wire=fp8", "combine=bf16"], PrecisionSpec(dispatch="fp8")),
        (["kv=fp8"], PrecisionSpec(kv="fp8")),
        (["int4"], PrecisionSpec(weights="int4")),
        (["int8", "experts=int4"], PrecisionSpec(weights="int8", experts="int4")),
        (["experts=int4", "group=128"], PrecisionSpec(experts="int4", group=128)),
        (
            ["fp8", "experts=nvfp4"],
            replace(parse_precision(["fp8"]), experts="nvfp4"),
        ),
        (["mxfp4", "kv=int4"], PrecisionSpec(weights="mxfp4", kv="int4")),
        (["fp16"], PrecisionSpec(weights="float16", kv="float16", dispatch="float16", combine="float16")),
    ],
)
def test_formats(parts: list[str], expected: PrecisionSpec) -> None:
    assert parse_precision(parts) == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "fp4",
            "'fp4': format 'fp4' is unknown: use one of float32, bfloat16, float16, fp8, int8, int4, mxfp4, nvfp4",
        ),
        (
            "cache=fp8",
            "--precision 'cache=fp8': 'cache' is none of weights, experts, group, kv, wire, dispatch, combine, compute",
        ),
        ("group=0", "--precision 'group=0': group is a number of columns from 1 to 65536, for example 128"),
        ("compute=int4", "--precision 'compute=int4': compute must be one of float32, bfloat16, fp8"),
    ],
)
def test_formats_that_do_not_exist(part: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_precision([part])


def test_layouts_are_kept_in_one_order() -> None:
    assert SearchOptions(layout=["dp_ep,hybrid", "tp_pp"]).layouts() == ("hybrid", "tp_pp", "dp_ep")
    assert len(SearchOptions().layouts()) == len(SearchOptions(layout=["auto"]).layouts()) == 4


def test_overrides_change_what_was_named_and_nothing_else() -> None:
    workload = load_workload("chat")
    changed = SearchOptions(slo_tpot="80ms", slo_ttft="none", percentile=0.9, rate=7.5).apply_to_workload(workload)
    assert (changed.slo.tpot_s, changed.slo.ttft_s, changed.slo.percentile) == (pytest.approx(0.08), None, 0.9)
    assert changed.requests_per_s == 7.5
    assert changed.input_tokens == workload.input_tokens
    assert SearchOptions().apply_to_workload(workload) == workload


@settings(max_examples=50, deadline=None)
@given(price=st.floats(min_value=1e-3, max_value=1e6))
def test_prices_reach_their_device_alone(price: float) -> None:
    cluster = load_cluster("msi-hetero")
    changed = SearchOptions(price=[f"l40s={price!r}"]).apply_to_cluster(cluster)
    assert [group.device.price for group in changed.groups] == [cluster.groups[0].device.price, price]
    assert math.isclose(sum(group.num_devices for group in changed.groups), cluster.num_devices)


def test_a_price_of_a_device_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"--price H200: cluster msi-hetero has no such device: did you mean H20\?"):
        SearchOptions(price=["H200=5"]).apply_to_cluster(load_cluster("msi-hetero"))


def test_inputs_know_where_the_model_came_from() -> None:
    inputs = read_inputs("Mixtral 8x22B", SearchOptions(cluster="msi-hetero", phase="both"))
    assert inputs.model_name == "mixtral-8x22b"
    assert inputs.model.router.num_experts == inputs.config["num_local_experts"] == 8
    assert inputs.phases == ("prefill", "decode")


@pytest.mark.parametrize(
    ("parts", "option"),
    [
        ([], ""),
        (["fp8"], ""),
        (["int4"], ""),  # all in 4 bits: rounding at load has no such form
        (["int8"], " --weights int8"),
        (["int8", "experts=int4"], " --weights int4"),
        (["weights=int8", "experts=mxfp4"], " --weights mxfp4"),
        (["weights=int8", "experts=int4", "group=128"], ""),
    ],
)
def test_what_a_server_rounds_at_load(parts: list[str], option: str) -> None:
    assert rounded_at_load(parse_precision(parts)) == option


def test_a_file_in_few_bits_is_planned_as_it_is_unless_formats_of_weights_are_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    folder = save_tiny_model(tmp_path / "model", **sizes, decoder_sparse_step=1).folder
    assert read_inputs(str(folder), SearchOptions(cluster="laptop")).precision == PrecisionSpec()
    write_gguf(folder, file := tmp_path / "model.gguf", all_of(Kind.Q8_0))

    def precision(*asked: str) -> PrecisionSpec:
        return read_inputs(str(file), SearchOptions(cluster="laptop", precision=list(asked))).precision

    found = precision("kv=fp8")
    assert (found.weights, found.experts, found.kv) == ("int8", "int8", "fp8")
    assert found.stored == pytest.approx((1.0625, 1.0625, 1.0625), rel=0.01)
    assert rounded_at_load(found) == "", "it is in 8 bits already"
    assert precision("int4") == PrecisionSpec(weights="int4")
    assert precision("experts=int4") == PrecisionSpec(experts="int4")
