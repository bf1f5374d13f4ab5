"""Names and paths of shipped files; what is offered when a name is wrong; a source for every number."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.models.planned import load_planned_model
from antiphon.reproduce.lina import lina_models
from antiphon.specs.catalog import Kind, catalog, names, shipped_file
from antiphon.specs.checked import canonical, nearest_names
from antiphon.specs.cluster import DeviceSpec, load_cluster, load_device
from antiphon.specs.workload import load_workload

KINDS: tuple[Kind, ...] = ("device", "cluster", "workload", "model")
ISSUE_DEVICES = ("A100-80G", "A800", "H100", "H800", "H200", "H20", "L20", "L40S", "B200", "GB200", "MI300X", "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_file_says_what_it_is_and_where_it_is_from(kind: Kind) -> None:
    entries = catalog(kind)
    assert len(entries) >= 8
    for entry in entries:
        assert entry.path.is_file(), entry
        assert entry.summary, entry
        assert entry.source or kind == "device", entry


def test_no_two_files_answer_to_one_name() -> None:
    for kind in KINDS:
        known = [name for e in catalog(kind) for name in {canonical(n) for n in (e.name, e.path.stem, *e.aliases)}]
        assert len(set(known)) == len(known), kind


@pytest.mark.parametrize("name", [*ISSUE_DEVICES, "Ascend-910B"])
def test_the_devices_of_the_papers_are_there(name: str) -> None:
    assert load_device(name).name == name


@pytest.mark.parametrize("name", names("device"))
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    device = load_device(name)
    numbers = {f.name for f in fields(DeviceSpec)} - {"name", "kind", "sources", "price"}
    numbers -= {"sustained"} if device.sustained == 1 else set()
    numbers -= {name for name in ("num_processors", "streamed") if getattr(device, name) is None}
    numbers |= {"price"} if device.price is not None else set()
    numbers -= {name for name in ("scale_up_spans_nodes", "scale_up_mesh") if not getattr(device, name)}
    assert set(device.sources) == numbers
    assert all(len(source) > 5 for source in device.sources.values())


@pytest.mark.parametrize("name", names("cluster"))
def test_every_cluster_has_sources(name: str) -> None:
    cluster = load_cluster(name)
    assert len(cluster.source) > 10
    assert len(cluster.efficiency.source) > 10
    assert all(group.device.sources for group in cluster.groups)


@pytest.mark.parametrize("name", names("workload"))
def test_every_workload_has_a_source(name: str) -> None:
    assert len(load_workload(name).source) > 10


@pytest.mark.parametrize("name", names("model"))
def test_every_model_can_be_read_by_name_and_alias(name: str) -> None:
    entry = next(entry for entry in catalog("model") if entry.name == name)
    spec = load_planned_model(shipped_file("model", name)).spec
    assert spec.dtype == "bfloat16"
    assert all(load_planned_model(shipped_file("model", alias)).spec == spec for alias in entry.aliases)
    assert len(json.loads(entry.path.read_text())["_comment"]) > 20


@pytest.mark.parametrize("spelling", ["H100", "h100", "h100-sxm", "H100 SXM", "h100_80g"])
def test_names_are_found_whatever_their_spelling(spelling: str) -> None:
    assert load_device(spelling).name == "H100"


def test_peaks_are_dense() -> None:
    """No sparsity figures: an H100 has 989 TFLOP/s in BF16, twice that in FP8; Ampere has no FP8 at all."""
    assert load_device("H100").flops_per_s["bfloat16"] == 989e12
    for name in names("device"):
        rates = load_device(name).flops_per_s
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["bfloat16"], rel=0.03)
    with pytest.raises(UserError, match="A100-80G has no fp8 arithmetic: compute in one of bfloat16, float32"):
        load_device("A100-80G").peak_flops_per_s("fp8")


def test_links_are_one_direction() -> None:
    """NVLink 4: 900 GB/s are printed for both directions together."""
    assert load_device("H100").scale_up_bytes_per_s == 450e9
    assert load_device("H800").scale_up_bytes_per_s == load_device("A800").scale_up_bytes_per_s == 200e9
    assert load_device("GB200").scale_up_domain == 72


def test_ratios_of_table_3() -> None:
    """MegaScale-Infer Table 3: capacity, bandwidth and compute per price, to the digits printed."""
    table = {
        "L20": (48, 864, 119.5),
        "H800": (15.2, 649.7, 187.3),
        "A800": (35.4, 902.2, 138.1),
        "H20": (51.9, 2214.1, 80.0),
        "L40S": (44.4, 800.0, 335.2),
    }
    for name, printed in table.items():
        device = load_device(name)
        assert device.price is not None
        peaks = (device.memory_bytes / 1e9, device.memory_bytes_per_s / 1e9, device.flops_per_s["bfloat16"] / 1e12)
        assert [peak / device.price for peak in peaks] == pytest.approx(printed, abs=0.051)


def test_an_unknown_name_offers_the_nearest_and_all() -> None:
    with pytest.raises(UserError, match=r"device 'H21' is unknown: did you mean H20, .*Shipped: A100-40G, .*MI300X"):
        load_device("H21")
    with pytest.raises(UserError, match="model 'mixtral-8x2b' is unknown: did you mean mixtral-8x22b"):
        shipped_file("model", "mixtral-8x2b")
    with pytest.raises(UserError, match="device 'zzzzzz' is unknown: Shipped: A100-40G"):
        load_device("zzzzzz")


def test_a_path_that_leads_nowhere_is_not_taken_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.toml: there is no such file: give a cluster file, or one of gb200"):
        load_cluster(tmp_path / "mine.toml")


def test_a_model_may_be_a_folder(tmp_path: Path) -> None:
    assert shipped_file("model", tmp_path) == tmp_path


def test_names_that_cannot_be_files() -> None:
    for name in ("", "x" * 400, "~nobody", "a\0b"):
        with pytest.raises(UserError, match="is unknown"):
            shipped_file("model", name)


def test_reading_a_model_needs_neither_torch_nor_numpy() -> None:
    """`antiphon plan` should start quickly."""
    code = "import sys, antiphon.models.config; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_nearest_names_are_at_most_three_and_the_best_comes_first() -> None:
    assert nearest_names("A800G", names("device"))[0] == "A800"
    assert len(nearest_names("H", names("device"))) <= 3
    assert nearest_names("", ["a"]) == []


@pytest.mark.parametrize(
    ("layers", "experts", "printed"),
    [(12, 4, 117e6), (24, 4, 233e6), (36, 4, 349e6), (12, 16, 419e6), (24, 16, 838e6), (36, 16, 1.2e9)],
)
def test_linas_transformer_xl_has_the_parameters_of_its_table_1(layers: int, experts: int, printed: float) -> None:
    """Within 0.6% (biases, norms and gates are not counted); "1.2B" has two digits only."""
    ours = lina_models()["transformer-xl"].parameters(experts, layers)
    assert ours == pytest.approx(printed, rel=0.05 if printed == 1.2e9 else 0.006)


def test_linas_models() -> None:
    assert sorted(lina_models()) == ["bert-large", "bert2gpt2", "gpt-2", "transformer-xl"]
    gpt = lina_models()["gpt-2"]
    assert gpt.parameters(2) == 12 * (4 * 768**2 + 2 * gpt.expert_parameters)
