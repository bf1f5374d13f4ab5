"""The layouts that plans are measured in, which processes join from where, and the time that counts."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.bench import openai_peer, served_plans
from antiphon.bench.openai_peer import OpenAIPeer, StreamedAnswer
from antiphon.bench.serve import WorkloadSize
from antiphon.bench.served_plans import Machines, _roles_elsewhere, layouts_of, serve_and_measure
from antiphon.bench.serving_peers import PeerError, Workload
from antiphon.planner.candidates import parse_pins
from antiphon.serve.served_plan import ServedPlan
from antiphon.specs.plan import LAYOUTS, Predicted


def served(layout: str, node_devices: int, **sizes: int) -> ServedPlan:
    plain = {"num_instances": 1, "num_attention": 1, "num_experts": 1, "attention_tp": 1, "expert_tp": 1}
    return ServedPlan(
        file=Path("plan.json"),
        layout=layout,  # type: ignore[arg-type]
        num_micro_batches=1,
        max_running=8,
        placement=None,
        predicted=Predicted(),
        devices=("this-core",),
        node_devices=node_devices,
        notes=(),
        **(plain | sizes),
    )


@pytest.mark.parametrize("num_devices", [2, 4])
def test_layouts_use_all_devices(num_devices: int) -> None:
    layouts = layouts_of(num_devices)
    assert len({each.name for each in layouts}) == len(layouts) == 9
    for each in layouts:
        pins = parse_pins(each.pins.split(","))
        assert each.layout in LAYOUTS
        attention = (pins.attention_tp or 1) * (pins.attention_dp or 1) * (pins.pp or 1)
        devices = attention * each.num_instances
        apart = each.layout == "disaggregated"
        assert devices + ((pins.expert_ep or 0) if apart else 0) == num_devices, each.name


def test_what_is_started_on_other_nodes() -> None:
    assert _roles_elsewhere(served("disaggregated", 1)) == ["experts"]
    assert _roles_elsewhere(served("colocated", 1, num_attention=2)) == ["replica"]
    assert _roles_elsewhere(served("colocated", 2, attention_tp=4)) == ["replica"] * 2
    assert _roles_elsewhere(served("colocated", 1, num_stages=3)) == ["replica"] * 2
    assert _roles_elsewhere(served("hybrid", 2, num_attention=4, expert_tp=2)) == ["replica"] * 2


class Recorded(OpenAIPeer):
    """Answers that came at these times."""

    def __init__(self, *arrivals_s: list[float]) -> None:
        super().__init__("http://nobody")
        self._recorded = [StreamedAnswer(each, len(each), None) for each in arrivals_s]

    async def _both_passes(self, workload: Workload) -> tuple[float, float, float, list[StreamedAnswer]]:
        return 0.0, 0.0, 0.0, self._recorded


def test_only_the_time_in_which_all_decode_counts() -> None:
    workload = Workload([[1], [2]], 4)
    late = Recorded([1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 4.5, 5.5])
    assert late.steady_decode_tokens_per_s(workload) == pytest.approx(3 / 1.5)
    with pytest.raises(PeerError, match="4 output tokens are too few"):
        Recorded([1.0, 2.0], [3.0, 4.0]).steady_decode_tokens_per_s(workload)


class Silent(OpenAIPeer):
    """Never answers."""

    async def _both_passes(self, workload: Workload) -> tuple[float, float, float, list[StreamedAnswer]]:
        await asyncio.sleep(600.0)
        raise AssertionError


def test_answers_that_never_come_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_peer, "RUN_TIMEOUT_S", 0.1)
    with pytest.raises(PeerError, match="openai: http://nobody did not answer all within 0 s"):
        Silent("http://nobody").steady_decode_tokens_per_s(Workload([[1]], 4))


def test_a_dead_server_is_shown_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def dead(*_: object) -> Iterator[str]:
        (tmp_path / "server.log").write_text("long ago" + 1000 * "." + "no memory is left")
        yield "http://127.0.0.1:9"  # discard: nothing listens there

    monkeypatch.setattr(served_plans, "serving", dead)
    here = Machines(box=None, cluster=(), num_devices=1, devices_per_node=1)
    size = WorkloadSize(concurrency=1, input_tokens=2, output_tokens=2)
    with pytest.raises(UserError, match=r"the load failed: openai: .* log: \.+no memory is left$"):
        serve_and_measure(here, Path("examples/demo-moe"), served("colocated", 1), size, tmp_path)
