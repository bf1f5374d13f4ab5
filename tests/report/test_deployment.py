"""The drawing of devices: every device once, workers whole inside nodes, what they hold, large plans stay small."""

import re
from dataclasses import replace

import pytest

from antiphon.report.gather import Report
from antiphon.report.serving_figures import TIP_OF_IDLE, deployment_drawing
from antiphon.specs.cluster import load_cluster
from antiphon.specs.plan import DeviceUse, Parallel, PhasePlan


def tips(phase: PhasePlan, cluster: str = "msi-hetero") -> list[str]:
    """What the devices say, those that are used."""
    svg = deployment_drawing("decode", phase, load_cluster(cluster)).svg
    return [tip.replace("&#10;", "\n") for tip in re.findall(r'data-tip="([^"]*)"', svg) if tip != TIP_OF_IDLE]


def sized(report: Report, num_devices: int = 0, **sizes: int) -> PhasePlan:
    """The report's decode phase in other sizes; with `num_devices`, colocated on so many."""
    decode = report.plan.phases["decode"]
    phase = replace(decode, parallel=replace(decode.parallel, **sizes), placement=())
    if not num_devices:
        return phase
    use = DeviceUse(role="both", device="H20", num_devices=num_devices)
    return replace(phase, layout="dp_ep", devices=(use,), parallel=Parallel(**sizes))


def test_every_worker_says_what_it_holds(report: Report) -> None:
    found = tips(report.plan.phases["decode"])
    assert found[:16] == [f"attention worker {worker}" for worker in range(16)]
    assert found[16] == "expert worker 0\nexperts 0, 7"
    assert found[23] == "expert worker 7\nexpert 7"
    assert len(found) == 24


def test_a_worker_is_not_split_over_nodes(report: Report) -> None:
    """Workers of 3 on nodes of 8: two a node, two devices idle."""
    drawing = deployment_drawing("decode", sized(report, attention_tp=3, attention_dp=4), report.cluster)
    assert "H20: 12 devices on 2 nodes of 8" in drawing.svg
    assert "attention worker 3, device 3 of 3" in drawing.svg
    assert [name for name, _ in drawing.legend] == ["attention", "experts"]


def test_a_worker_wider_than_a_node_takes_several(report: Report) -> None:
    drawing = deployment_drawing("decode", sized(report, attention_tp=12, attention_dp=1), report.cluster)
    assert "H20: 12 devices on 2 nodes of 8" in drawing.svg


def test_one_kind_of_device_holds_both(report: Report) -> None:
    uses = tuple(replace(use, device="H20") for use in report.plan.phases["decode"].devices)
    phase = replace(sized(report, attention_dp=3, expert_workers=5), devices=uses)
    assert "H20: 8 devices on 1 node of 8" in deployment_drawing("decode", phase, report.cluster).svg


def test_colocated_devices_have_both_ranks(report: Report) -> None:
    phase = sized(report, 8, attention_tp=2, attention_dp=4, expert_ep=8)
    assert tips(phase)[3] == "attention copy 1, device 2 of 2\nexpert rank 3"
    staged = sized(report, 16, attention_tp=2, attention_dp=4, expert_ep=4, expert_tp=2, pp=2)
    assert tips(staged)[15] == "stage 2, attention copy 3, device 2 of 2\nexpert rank 3, device 2 of 2"
    assert "between nodes: " in deployment_drawing("decode", staged, report.cluster).svg


@pytest.mark.parametrize("count", [100, 10_000])
def test_many_nodes_are_counted_not_drawn(report: Report, count: int) -> None:
    drawing = deployment_drawing("decode", sized(report, attention_dp=count), report.cluster)
    assert re.search(rf"and {-(-count // 8) - 5:,} nodes more", drawing.svg)
    assert len(drawing.svg) < 60_000


def test_a_domain_that_spans_nodes_needs_no_network(report: Report) -> None:
    use = DeviceUse(role="both", device="GB200", num_devices=32)
    phase = replace(sized(report, 32, attention_dp=32, expert_ep=32), devices=(use,))
    drawing = deployment_drawing("decode", phase, load_cluster("gb200-nvl72"))
    assert "72 devices joined at 900 GB/s each, each way" in drawing.svg
    assert "between nodes" not in drawing.svg
