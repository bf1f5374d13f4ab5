"""The link between two machines: what is fitted, what the planner gets of it, what is refused, and a measured one."""

import json
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.base.system import python_module
from antiphon.bench.box import Box, box_unavailable
from antiphon.bench.profile.links import WireTimes, fitted_link, follow_link, measure_links, slowest, with_link
from antiphon.cli.commands import single_command
from antiphon.cli.profile import profile
from antiphon.cost.network import network
from antiphon.serve.joining import exchange_secret
from antiphon.specs.cluster import cluster_to_json, load_cluster

SECRET = b"only for this test"
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)


def wires(latency_s: float, rate: float, half: float, both: float = 1.0) -> list[WireTimes]:
    times = {size: latency_s + (size + half) / rate for size in SIZES}
    return [WireTimes(size_bytes=size, one_way_s=s, both_ways_s=both * s) for size, s in times.items()]


def test_a_link_is_found_again_from_its_times() -> None:
    link = fitted_link(50e-6, wires(50e-6, 1e8, 4000.0, both=1.5))
    assert link.bytes_per_s == pytest.approx(1e8)
    assert (link.latency_s, link.half_bytes) == (pytest.approx(50e-6), pytest.approx(4000.0))
    assert (link.both_ways, link.error) == (pytest.approx(1.5), pytest.approx(0.0, abs=1e-9))
    assert [wire.is_fitted for wire in link.wires] == [True, False] * 3
    with pytest.raises(UserError, match="larger messages took no longer"):
        fitted_link(1e-4, [WireTimes(size_bytes=size, one_way_s=1e-4, both_ways_s=1e-4) for size in SIZES])


def test_the_planner_reads_scale_out_apart_from_scale_up() -> None:
    cluster = load_cluster("msi-ampere")
    link = fitted_link(50e-6, wires(50e-6, 1e8, 4000.0, both=2.0))
    linked = with_link(cluster, link)
    before, after = (network(each, each.groups[0]) for each in (cluster, linked))
    assert after.scale_up == before.scale_up
    assert after.scale_out.bytes_per_s == pytest.approx(0.5e8 / cluster.groups[0].devices_per_node)
    assert (after.scale_out.latency_s, after.scale_out.half_bytes) == (pytest.approx(50e-6), pytest.approx(4000.0))
    assert linked.groups[0].num_nodes == cluster.groups[0].num_nodes
    alone = replace(cluster, groups=(replace(cluster.groups[0], num_nodes=1),))
    assert with_link(alone, link).groups[0].num_nodes == 2, "like the only one"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL is missing"),
        (["--join", "1.2.3.4:5", "--listen", "1.2.3.4:5"], "--join does not apply with --listen"),
        (["--join", "nowhere"], "address is 'nowhere'"),
        (["--listen", "0.0.0.0:7000"], "--listen"),
        (["--join", "1.2.3.4:5", "--folder", "."], "does not apply with --join"),
        (["--listen", "127.0.0.1:0", "--folder", "."], "has no this-machine.json"),
        (["--join", "1.2.3.4:5", "--cluster", "msi-ampere"], "does not apply with --join"),
        (["--listen", "127.0.0.1:0", "--cluster", "no-such"], "no-such"),
        (["--listen", "127.0.0.1:0", "--cluster", "msi-hetero"], "kinds of nodes"),
        (["examples/demo-moe", "--cluster", "msi-ampere"], "--cluster msi-ampere is for --listen"),
        (["examples/demo-moe", "--secret-file", "x"], "--secret-file x is for --listen and --join"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_JOIN_SECRET", "only for this test")
    with pytest.raises(UserError, match=re.escape(said)):
        CliRunner().invoke(single_command(profile), arguments, catch_exceptions=False)


def test_two_ends_on_this_machine(free_tcp_port: int) -> None:
    address = f"127.0.0.1:{free_tcp_port}"
    other = threading.Thread(target=follow_link, args=(address, "127.0.0.1", SECRET), daemon=True)
    other.start()
    (link,) = measure_links(address, SECRET, lambda done, total: None, sizes=(1 << 10, 1 << 18, 1 << 22))
    other.join(30)
    assert not other.is_alive()
    assert link.bytes_per_s > 1e6
    assert [wire.size_bytes for wire in link.wires] == [1 << 10, 1 << 18, 1 << 22]


def test_all_nodes_of_a_cluster_join_one_address(
    free_tcp_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured in turn; the cluster keeps its nodes and gets the slowest link."""
    sizes = (1 << 10, 1 << 18, 1 << 22)
    monkeypatch.setattr("antiphon.cli.profile.measure_links", partial(measure_links, sizes=sizes))
    monkeypatch.setenv("ANTIPHON_JOIN_SECRET", SECRET.decode())
    address = f"127.0.0.1:{free_tcp_port}"
    file = tmp_path / "nodes.json"
    three = load_cluster("msi-ampere")
    three = replace(three, groups=(replace(three.groups[0], num_nodes=3),))
    file.write_text(json.dumps(cluster_to_json(three)))
    secret = exchange_secret(SECRET)
    ends = [threading.Thread(target=follow_link, args=(address, "127.0.0.1", secret), daemon=True) for _ in range(2)]
    for end in ends:
        end.start()
    arguments = ["--listen", address, "--cluster", str(file), "--folder", str(tmp_path / "out")]
    done = CliRunner().invoke(single_command(profile), arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "on each of the 2 other machines: antiphon profile --join" in done.stdout
    assert "of 2 links in the order in which they joined" in done.stdout
    for end in ends:
        end.join(30)
        assert not end.is_alive()
    assert load_cluster(tmp_path / "out" / "these-machines.json").groups[0].num_nodes == 3


def test_the_slowest_link_is_that_of_large_messages() -> None:
    fast, slow = (fitted_link(latency_s, wires(latency_s, rate, 1e3)) for latency_s, rate in ((9e-4, 1e9), (1e-5, 1e7)))
    assert slowest([fast, slow, fast]) is slow


@pytest.mark.slow
@pytest.mark.skipif(box_unavailable() is not None, reason=str(box_unavailable()))
def test_a_link_of_a_box_is_predicted_within_a_tenth(tmp_path: Path) -> None:
    env = {"ANTIPHON_JOIN_SECRET": "only for this test"}
    with Box(num_nodes=2, mbit=100) as box:
        address = f"{box.address(0)}:7700"
        box.start(1, python_module("antiphon.cli.main", "profile", "--join", address), env=env)
        file = tmp_path / "link.json"
        command = python_module("antiphon.cli.main", "profile", "--listen", address, "--json", str(file))
        done = box.run(0, command, timeout_s=120, env=env)
        assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["bytes_per_s"] == pytest.approx(100e6 / 8, rel=0.1)
    assert found["error"] < 0.1
