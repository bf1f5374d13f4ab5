"""Requests, steps and tokens that share a machine's cores: closed forms, and what it was before where all is free."""

import math
from dataclasses import replace

import pytest

from antiphon.base.errors import UserError
from antiphon.cost.curves import Curve
from antiphon.cost.profile import HostTimes, MachineFacts, Profile
from antiphon.planner.setting import Setting
from antiphon.sim.demand import draw_demand
from antiphon.sim.host import CoreWaits, DrawnWaits, ServingHost, SharedCores, Then
from antiphon.sim.pools import ServingOptions, pools_of
from antiphon.sim.serve_log import Record, ServingRun
from antiphon.sim.serve_results import summary
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.plan import PhasePlan
from antiphon.specs.workload import WorkloadSpec
from tests.sim.serving_specimens import apart, cluster, plan, setting, together, workload

TURN_S = 2e-3


def always(seconds: float) -> Curve:
    return Curve((1.0,), (seconds,), may_fall=True)


def host(**changes: object) -> HostTimes:
    nothing = HostTimes(
        request_s=0.0, token_s=always(0.0), client_request_s=0.0, client_token_s=always(0.0), wait_s=0.0
    )
    return replace(nothing, **changes)  # type: ignore[arg-type]


def on_one_node(of: WorkloadSpec, times: HostTimes | None, num_cores: int = 64, turn_s: float = TURN_S) -> Setting:
    (group,) = cluster().groups
    measured = Profile(
        command="test",
        created="2026-11-27",
        machine=MachineFacts(name="box", num_cores=num_cores, memory_bytes=8 * 10**9),
        model="small",
        dtype="bfloat16",
        attention=(),
        experts=(),
        step_s=turn_s,
        host=times,
    )
    one = replace(cluster(), groups=(replace(group, num_nodes=1),))
    return replace(setting(of), cluster=one, profile=measured)


def serve(
    of: WorkloadSpec,
    where: Setting,
    phases: dict[str, PhasePlan],
    *,
    count: int = 40,
    client_here: bool = True,
    waits: CoreWaits | None = None,
) -> ServingRun:
    requests = draw_demand(of, num_requests=count, seed=0)
    pools = pools_of(plan(of, **phases), where, requests)
    return simulate_serving(pools, requests, ServingOptions(client_here=client_here, core_waits=waits))


PHASES = {
    "one pool": {"decode": apart(instances=2)},
    "two pools": {"prefill": together(dp=1, batch=512), "decode": together(dp=1)},
}


def test_processes_share_cores_and_threads_share_a_process() -> None:
    cores = SharedCores(2)
    ended: list[tuple[str, float]] = []

    def work(process: str, thread: str, seconds: float, num_cores: int = 1) -> None:
        cores.add(0.0, process, thread, seconds, lambda: ended.append((thread, now)), num_cores)

    work("server", "loop", 1.0)
    work("server", "engine", 1.0)
    work("server", "engine", 0.5)
    work("worker", "worker", 3.0, 3)
    while (now := cores.next_s()) < float("inf"):
        for then in cores.done(now):
            then()
    # four cores are wanted and two are there: half speed, and a quarter for each of the server's threads; then half of
    # a second is left of each, and at last the worker, which would like three cores, has two
    assert [name for name, _ in ended] == ["loop", "engine", "engine", "worker"]
    assert [when for _, when in ended] == pytest.approx([4.0, 4.0, 5.0, 5.75])


def test_a_step_that_waits_for_the_wire_has_no_core() -> None:
    now, waits, ended = 0.0, list[tuple[float, Then]](), dict[str, float]()
    machine = ServingHost(
        host(), 1, lambda: now, lambda time_s, then: waits.append((time_s, then)), has_client=False, hands_over=True
    )
    machine.step("prefill 0", 1, 1.0, 0.0, lambda: ended.update(prefill=now), wait_s=5.0)
    machine.step("decode 0", 1, 2.0, 0.0, lambda: ended.update(decode=now))
    while len(ended) < 2:
        now = min([machine.cores.next_s(), *(time_s for time_s, _ in waits)])
        waiting, waits = waits, []
        for time_s, then in waiting:
            (then() if time_s == now else waits.append((time_s, then)))
        for then in machine.cores.done(now):
            then()
    # half a core each until the prompt is computed, then the decode step has all of it
    assert ended == {"decode": 3.0, "prefill": 7.0}


@pytest.mark.parametrize("phases", PHASES.values(), ids=PHASES.keys())
def test_a_host_that_takes_nothing_changes_nothing(phases: dict[str, PhasePlan]) -> None:
    of = workload(rate=200.0)
    without = serve(of, on_one_node(of, None, turn_s=0.0), phases, client_here=False)
    free = serve(of, on_one_node(of, host(), turn_s=0.0), phases)  # turns of two instances would share a thread
    for one, other in zip(without.records, free.records, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s)
        assert one.finished_s == pytest.approx(other.finished_s)


def test_a_request_alone_takes_the_sum_of_its_parts() -> None:
    of = workload(rate=0.001, sigma=0.0)
    alone = serve(of, on_one_node(of, None), PHASES["one pool"], count=2, client_here=False)
    parts = host(request_s=1e-3, token_s=always(2e-4), client_request_s=3e-3, client_token_s=always(4e-4), wait_s=5e-3)
    for client_here, beside_s in ((True, 1e-3 + 2e-4 + 3e-3 + 4e-4 + 5e-3), (False, 1e-3 + 2e-4 + 5e-3)):
        found = serve(of, on_one_node(of, parts), PHASES["one pool"], count=2, client_here=client_here)
        for one, other in zip(found.records, alone.records, strict=True):
            assert one.ttft_s == pytest.approx(beside_s + (other.ttft_s or 0.0))
            assert one.tpot_s == pytest.approx(other.tpot_s)  # tokens are written while the next step runs


def test_decode_steps_take_longer_within_a_server_and_prompts_do_not() -> None:
    of = workload(rate=0.001, sigma=0.0)

    def first(ratio: float) -> Record:
        where = on_one_node(of, host(step_ratio=always(ratio)), turn_s=0.0)
        return serve(of, where, PHASES["two pools"], count=1).records[0]

    one, twice = first(1.0), first(2.0)
    assert twice.ttft_s == pytest.approx(one.ttft_s, rel=1e-2)  # each run draws its experts
    assert twice.tpot_s == pytest.approx(2 * (one.tpot_s or 0.0), rel=1e-2)


def test_a_prompt_handed_over_takes_what_was_measured() -> None:
    of = workload(rate=0.001, sigma=0.0)
    times = [
        serve(of, on_one_node(of, host(handover_s=seconds)), PHASES["two pools"], count=1).records[0].ttft_s
        for seconds in (1.0, 2.0)
    ]
    assert times[1] == pytest.approx((times[0] or 0.0) + 1.0)


def test_tokens_that_cost_the_server_slow_steps_where_cores_are_few() -> None:
    of = workload(rate=200.0)
    costly = host(token_s=always(1e-3), client_token_s=always(1e-3))
    many, few = (serve(of, on_one_node(of, costly, num_cores), PHASES["two pools"]) for num_cores in (64, 1))
    assert few.end_s > 1.3 * many.end_s
    tokens = sum(record.num_output for record in few.records)
    assert few.end_s >= tokens * 2e-3  # the cores' work is not lost
    assert all(record.num_output == record.output_tokens for record in few.records)


def test_a_client_needs_times_of_this_machine() -> None:
    of = workload(rate=1.0)
    with pytest.raises(UserError, match="--client-here: the profile does not have what HTTP takes"):
        serve(of, on_one_node(of, None), PHASES["one pool"])
    elsewhere = replace(on_one_node(of, host()), cluster=cluster())
    with pytest.raises(UserError, match="--client-here: the plan's cluster has 3 nodes"):
        serve(of, elsewhere, PHASES["one pool"])
    with pytest.raises(UserError, match="--client-here: no --profile is given"):
        serve(of, replace(elsewhere, profile=None), PHASES["one pool"])


def test_waits_for_cores_are_drawn_as_often_as_measured() -> None:
    drawn = DrawnWaits(CoreWaits(stalls_per_s=50.0, stalls_s=(1e-3, 3e-3), wakes_s=(0.0, 4e-3)), seed=1)
    steps = [drawn.stalled_s(0.01) for _ in range(4000)]
    assert sum(steps) == pytest.approx(4000 * 0.01 * 50.0 * 2e-3, rel=0.1)
    assert steps.count(0.0) == pytest.approx(4000 * math.exp(-0.5), rel=0.1)
    assert sum(drawn.woken_s() for _ in range(4000)) == pytest.approx(4000 * 2e-3, rel=0.1)
    nothing = DrawnWaits(CoreWaits(stalls_per_s=0.0, stalls_s=(), wakes_s=()), seed=1)
    assert nothing.stalled_s(1.0) == nothing.woken_s() == 0.0
    packets = DrawnWaits(CoreWaits(stalls_per_s=0.0, stalls_s=(), wakes_s=(), network_share=0.2), seed=1)
    assert packets.stalled_s(0.8) == pytest.approx(0.2)


@pytest.mark.parametrize("phases", PHASES.values(), ids=PHASES.keys())
def test_tokens_that_wait_for_the_engine_come_late_and_delay_no_step_but_the_next_one(
    phases: dict[str, PhasePlan],
) -> None:
    of = workload(rate=0.001, sigma=0.0)
    where = on_one_node(of, None)
    late = CoreWaits(stalls_per_s=0.0, stalls_s=(), wakes_s=(1e-3,))
    plain, found = (serve(of, where, phases, count=2, client_here=False, waits=waits) for waits in (None, late))
    for one, other in zip(found.records, plain.records, strict=True):
        assert one.ttft_s == pytest.approx((other.ttft_s or 0.0) + 1e-3)
        assert one.tpot_s == pytest.approx(other.tpot_s)
    if all(phase.layout != "disaggregated" for phase in phases.values()):  # else the engine's turn is in a step's time
        later = replace(late, wakes_s=(8e-3,))  # simulated seconds: the next but one has no plan in time
        found = serve(of, where, phases, count=2, client_here=False, waits=later)
        for one, other in zip(found.records, plain.records, strict=True):
            assert (other.tpot_s or 0.0) + 2e-3 < (one.tpot_s or 0.0) < 8e-3
    sometimes = replace(late, wakes_s=(0.0, 0.0, 0.0, 4e-3))
    found = serve(of, where, phases, count=2, client_here=False, waits=sometimes)
    assert summary(*found.log.gaps_between())["p99"] > summary(*plain.log.gaps_between())["p99"] + 3e-3
    assert summary(*found.log.gaps_between())["mean"] == pytest.approx(
        summary(*plain.log.gaps_between())["mean"], rel=0.2
    )


def test_stalls_make_steps_longer() -> None:
    of = workload(rate=0.001, sigma=0.0)
    where = on_one_node(of, None)
    often = CoreWaits(stalls_per_s=1000.0, stalls_s=(1e-3,), wakes_s=())
    plain, found = (
        serve(of, where, PHASES["one pool"], count=2, client_here=False, waits=waits) for waits in (None, often)
    )
    for one, other in zip(found.records, plain.records, strict=True):
        assert (one.tpot_s or 0.0) > 1.5 * (other.tpot_s or 0.0)
