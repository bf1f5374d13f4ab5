"""A user's own cluster file: defaults from the devices, overrides, mixes, errors; JSON round trips."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.catalog import names
from antiphon.specs.cluster import (
    ClusterSpec,
    EfficiencySpec,
    NodeGroup,
    cluster_from_json,
    cluster_to_json,
    equal_nodes,
    load_cluster,
    load_device,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text('name = "mine"\n' + text)
    return path


def test_what_is_left_out_is_the_devices_own(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, '[[groups]]\ndevice = "H20"\nnum_nodes = 3\n'))
    (group,) = cluster.groups
    assert (group.num_nodes, group.devices_per_node, group.scale_up_domain) == (3, 8, 8)
    assert group.scale_up_bytes_per_s == 450e9
    assert group.node_scale_out_bytes_per_s == 8 * 50e9
    assert group.scale_out_bytes_per_s == 50e9
    assert cluster.efficiency == EfficiencySpec()
    assert cluster.num_devices == 24


def test_odd_nodes_keep_their_links_inside(tmp_path: Path) -> None:
    """7 GPUs a node are one domain of 7; an NVLink that leaves the node keeps its 72."""
    text = '[[groups]]\ndevice = "H20"\nnum_nodes = 3\ndevices_per_node = 7\n'
    text += '[[groups]]\ndevice = "GB200"\nnum_nodes = 18\ndevices_per_node = 4\n'
    odd, rack = load_cluster(write(tmp_path, text)).groups
    assert (odd.scale_up_domain, odd.num_devices, odd.node_scale_out_bytes_per_s) == (7, 21, 7 * 50e9)
    assert rack.scale_up_domain == 72


def test_everything_can_be_overridden(tmp_path: Path) -> None:
    text = """
scale_up_latency_s = 1e-6
scale_out_latency_s = 9e-6
oversubscription = 2
[[groups]]
device = "H20"
num_nodes = 1
devices_per_node = 4
scale_up_domain = 2
scale_up_bytes_per_s = 1e9
node_scale_out_bytes_per_s = 2e9
price = 9.5
power_w = 123
[efficiency]
gemm = 0.6
"""
    cluster = load_cluster(write(tmp_path, text))
    (group,) = cluster.groups
    assert (cluster.scale_up_latency_s, cluster.scale_out_latency_s, cluster.oversubscription) == (1e-6, 9e-6, 2)
    assert (group.scale_up_domain, group.scale_up_bytes_per_s, group.scale_out_bytes_per_s) == (2, 1e9, 0.5e9)
    assert (group.device.price, group.device.power_w) == (9.5, 123)
    assert "mine.toml" in group.device.sources["price"]
    assert cluster.efficiency.gemm == 0.6
    assert cluster.efficiency.memory == EfficiencySpec().memory
    assert "mine.toml" in cluster.efficiency.source


def test_a_price_can_be_given_to_a_device_that_has_none(tmp_path: Path) -> None:
    assert load_device("H100").price is None
    cluster = load_cluster(write(tmp_path, '[[groups]]\ndevice = "H100"\nnum_nodes = 1\nprice = 6.5\n'))
    assert cluster.groups[0].device.price == 6.5


def test_a_device_may_stand_in_the_file_or_beside_it(tmp_path: Path) -> None:
    inline = """
[[groups]]
num_nodes = 1
devices_per_node = 1
[groups.device]
name = "toy"
memory_bytes = 1e9
memory_bytes_per_s = 1e9
flops_per_s = { float32 = 1e9 }
scale_up_bytes_per_s = 1e9
scale_up_domain = 1
scale_out_bytes_per_s = 1e9
power_w = 1
num_processors = 1
"""
    assert load_cluster(write(tmp_path, inline)).groups[0].device.name == "toy"
    text = inline[inline.index("name = ") :].replace('"toy"', '"beside"')
    (tmp_path / "beside.toml").write_text(text)
    cluster = load_cluster(write(tmp_path, '[[groups]]\ndevice = "beside.toml"\nnum_nodes = 1\n'))
    assert cluster.groups[0].device.name == "beside"


H20 = '[[groups]]\ndevice = "H20"\nnum_nodes = 1\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.toml: groups is missing: add it"),
        ("groups = []", "cluster mine: it has no nodes"),
        ("groups = 3", "groups is 3: it must be an array"),
        ("groups = [3]", r"groups\[0\] is 3: it must be an object"),
        ('[[groups]]\ndevice = "H21"\nnum_nodes = 1', r"groups\[0\]: device 'H21' is unknown: did you mean H20"),
        ('[[groups]]\ndevice = "H20"', r"mine\.toml: groups\[0\]: num_nodes is missing"),
        (
            '[[groups]]\ndevice = "H20"\nnum_nodes = 0',
            r"groups\[0\]: num_nodes is 0: it must be at least 1",
        ),
        ('[[groups]]\ndevice = "H20"\nnum_nodes = -2', "num_nodes is -2: it must be at least 1"),
        ('[[groups]]\ndevice = "H20"\nnum_nodes = 1.5', "num_nodes is 1.5: it must be a valid integer"),
        ("[[groups]]\ndevice = 8\nnum_nodes = 1", "device is 8: it must be a name, a path or an object"),
        (H20 + "nodes = 1", r"groups\[0\]: unknown key nodes: did you mean num_nodes\?"),
        (H20 + "price = -1", "price is -1: it must be above 0"),
        (H20 + "power_w = 1e-320", "power_w is 1e-320: it must be above 1e-30"),
        (H20 + "node_scale_out_bytes_per_s = 0", "node_scale_out_bytes_per_s is 0: it must be above 0"),
        (H20 + H20, r"groups \['H20', 'H20'\] repeat a device"),
        (H20 + "[efficiency]\ngemm = 1.5", r"mine\.toml: efficiency.gemm is 1.5: it must be at most 1"),
        (H20 + "[efficiency]\ngem = 0.5", r"unknown key efficiency.gem: did you mean gemm\?"),
        ('calibrated = "soon"\n' + H20, "calibrated is 'soon': write a day, such as 2026-11-21"),
        ("oversubscription = 0.5\n" + H20, "oversubscription is 0.5: it must be at least 1"),
        ("scale_up_latency_s = -1\n" + H20, "scale_up_latency_s is -1: it must be at least 0"),
        ("oversubscriptoin = 1\n" + H20, r"unknown key oversubscriptoin: did you mean oversubscription\?"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_cluster(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a", "name": "b", "groups": []}', "mine.json: not valid JSON: 'name' stands there twice"),
        ('{"groups": [], "source": NaN}', "mine.json: not valid JSON: it holds NaN, which is not JSON"),
        ('{"groups": [], "oversubscription": 1e400}', "mine.json: not valid JSON: the number 1e400 is too large"),
        ("[" * 100_000, "mine.json: not valid JSON: nested too deeply"),
    ],
)
def test_json_that_says_two_things_or_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_cluster(path)


def test_numbers_of_numpy_are_numbers() -> None:
    device = load_device("H20")
    group = equal_nodes(device, np.int64(3), np.int32(7), 7, nics_bytes_per_s=np.float32(2e9))  # type: ignore[arg-type]
    assert (group.num_nodes, group.devices_per_node, group.node_scale_out_bytes_per_s) == (3, 7, 2e9)
    assert json.dumps(cluster_to_json(ClusterSpec(name="x", groups=(group,))))
    with pytest.raises(UserError, match=r"num_nodes is np.int64\(0\): it must be at least 1"):
        equal_nodes(device, np.int64(0), 7, 7)  # type: ignore[arg-type]
    mapping = {"name": "x", "groups": [{"device": "H20", "num_nodes": np.int64(1), "devices_per_node": np.int64(4)}]}
    assert cluster_from_json(mapping, "x").groups[0].scale_up_domain == 4


def test_the_clusters_of_the_papers() -> None:
    ampere = load_cluster("msi-ampere")
    assert ampere.num_devices == 64
    assert ampere.groups[0].scale_out_bytes_per_s == 25e9
    hetero = {group.device.name: group for group in load_cluster("msi-hetero").groups}
    assert hetero["H20"].node_scale_out_bytes_per_s == 200e9
    assert hetero["L40S"].node_scale_out_bytes_per_s == 100e9
    assert load_cluster("mix-h20").groups[0].node_scale_out_bytes_per_s == 400e9, "one NIC per GPU, by calibration"
    assert load_cluster("mix-ascend").groups[0].scale_up_bytes_per_s == 60e9
    assert load_cluster("msm-h800").num_devices == 1440
    assert load_cluster("lina-a100").num_devices == 16
    assert {g.device.name: g.num_nodes for g in load_cluster("h800-h20-64").groups} == {"H800": 32, "H20": 32}


@pytest.mark.parametrize("name", names("cluster"))
def test_shipped_clusters_survive_json(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    text = json.dumps(cluster_to_json(cluster))
    assert cluster_from_json(json.loads(text), "cluster") == cluster
    path = tmp_path / "cluster.json"
    path.write_text(text)
    assert load_cluster(path) == cluster


fractions = st.floats(0.01, 1)
rates = st.floats(1e6, 1e13)
efficiencies = st.builds(
    EfficiencySpec,
    gemm=fractions,
    memory=fractions,
    scale_out=fractions,
    kernel_s=st.floats(0, 1e-3),
    memory_reserve=st.floats(0, 1),
    source=st.text("abc", min_size=1),
)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    kinds = draw(st.lists(st.sampled_from(names("device")), min_size=1, max_size=3, unique=True))
    groups = tuple(
        NodeGroup(
            device=load_device(kind),
            num_nodes=draw(st.integers(1, 99)),
            devices_per_node=draw(st.integers(1, 9)),
            scale_up_domain=draw(st.integers(1, 72)),
            scale_up_bytes_per_s=draw(rates),
            node_scale_out_bytes_per_s=draw(rates),
        )
        for kind in kinds
    )
    return ClusterSpec(
        name=draw(st.text("xyz", min_size=1)),
        groups=groups,
        scale_out_latency_s=draw(st.floats(0, 1e-3)),
        oversubscription=draw(st.floats(1, 9)),
        efficiency=draw(efficiencies),
        source=draw(st.text("abc")),
    )


@settings(max_examples=50, deadline=None)
@given(cluster=clusters())
def test_json_round_trip(cluster: ClusterSpec) -> None:
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster))), "cluster") == cluster
