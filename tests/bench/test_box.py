"""The cluster in a box: lines and plans without rights, then real boxes where this machine can hold one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from antiphon.base.errors import UserError
from antiphon.bench.box import Box, BoxError, NodeProcess, box_unavailable, keeper, topology
from antiphon.bench.box.topology import LinkShape, plan_ranks
from benchmarks.box import parse_node_command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "benchmarks" / "box.py")
TRAFFIC = [sys.executable, "-I", "-S", str(Path(__file__).with_name("box_traffic.py"))]
WAIT_S = 30.0


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip where no box can be made."""
    if reason := box_unavailable():
        pytest.skip(reason)


@pytest.fixture
def box(possible: None) -> Iterator[Box]:
    with Box(num_nodes=3, mbit=400) as made:
        yield made


def serve(box: Box, node: int, *traffic: object) -> NodeProcess:
    """Start one of `box_traffic.py`'s kinds and wait until it is ready."""
    process = box.start(node, [*TRAFFIC, *map(str, traffic)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def traffic(box: Box, node: int, *arguments: object) -> str:
    done = box.run(node, [*TRAFFIC, *map(str, arguments)], timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def box_command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, **options)  # type: ignore


# --- what it would do, without doing it ---


def test_neighbours_have_a_link_of_their_own() -> None:
    near = LinkShape(mbit=600)
    up = topology.shaping("eth0", LinkShape(mbit=100), sends=True, near=[3], near_shape=near)
    down = topology.shaping("port2", LinkShape(mbit=100), sends=False, near=[3], near_shape=near)
    assert any("classid 1:30 htb rate 600000000bit" in line for line in up)
    assert any(line.endswith("match ip dst 10.77.0.4/32 flowid 1:30") for line in up)
    assert any(line.endswith("match ip src 10.77.0.4/32 flowid 1:30") for line in down)
    assert not any("1:30" in line for line in topology.shaping("eth0", LinkShape(mbit=100), sends=True))


def test_control_and_bulk_are_classes_of_one_link() -> None:
    lines = topology.shaping("eth0", LinkShape(mbit=400), sends=True)
    assert lines[0] == "qdisc add dev eth0 root handle 1: htb default 20"
    assert re.match(r"class add dev eth0 parent 1: classid 1:1 htb rate 400000000bit ceil 400000000bit ", lines[1])
    assert re.match(r".* classid 1:10 htb rate 380000000bit ceil 400000000bit .* prio 0$", lines[2])
    assert re.match(r".* classid 1:20 htb rate 20000000bit ceil 400000000bit .* prio 1$", lines[3])
    assert lines[-1].endswith("u32 match ip dsfield 0x10 0xfc flowid 1:10")
    fifo = topology.shaping("eth0", LinkShape(mbit=400, priority=False), sends=True)
    assert not any("1:10" in line for line in fifo)
    assert re.match(r".* classid 1:20 htb rate 400000000bit ceil 400000000bit ", fifo[2])


def test_delay_and_loss_are_of_what_the_node_sends() -> None:
    shape = LinkShape(mbit=100, delay_us=250, loss=0.001)
    assert sum("netem" in line for line in topology.shaping("eth0", shape, sends=True)) == 2
    assert any(line.endswith("delay 250us loss 0.1%") for line in topology.reshaping("eth0", shape, sends=True))
    assert not any("netem" in line for line in topology.shaping("port0", shape, sends=False))


@pytest.mark.parametrize("values", [{"mbit": 0}, {"mbit": 1e6}, {"mbit": 1, "delay_us": -1}, {"mbit": 1, "loss": 1.0}])
def test_links_that_cannot_be_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"give|between"):
        LinkShape(**values)  # type: ignore[arg-type]


def test_ranks_count_through_the_nodes() -> None:
    plans = plan_ranks(num_nodes=2, num_local_ranks=3, command=["c", "{rank}/{node}", "{address1}", '{"rank": {x}}'])
    assert [(plan.rank, plan.node, plan.local_rank) for plan in plans] == [(i, i // 3, i % 3) for i in range(6)]
    assert plans[4].args == ["c", "4/1", "10.77.0.2", '{"rank": {x}}']
    assert plans[4].env == {
        "BOX_NODE": "1",
        "BOX_RANK": "4",
        "BOX_LOCAL_RANK": "1",
        "BOX_NUM_NODES": "2",
        "BOX_WORLD_SIZE": "6",
        "BOX_ADDRESS": "10.77.0.2",
        "BOX_ADDRESSES": "10.77.0.1,10.77.0.2",
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
    }


def test_some_nodes_run_another_command() -> None:
    entry = parse_node_command("0,2-3:python 'a b.py' {address}", 5)
    assert entry == {node: ["python", "a b.py", "{address}"] for node in (0, 2, 3)}
    plans = plan_ranks(num_nodes=5, num_local_ranks=1, command=["c"], node_commands=entry)
    assert [plan.args[0] for plan in plans] == ["python", "c", "python", "python", "c"]
    for text in ("x", "0", ":c", "0-:c", "5:c", "0:", "0:'c", "3-1:c"):
        with pytest.raises(UserError, match="--node-command"):
            parse_node_command(text, 5)
    with pytest.raises(UserError, match="no command for node 1"):
        plan_ranks(num_nodes=2, num_local_ranks=1, command=[], node_commands=parse_node_command("0:c", 2))
    with pytest.raises(UserError, match=r"\{address2\} in 'x\{address2\}'; this box has nodes 0 to 1"):
        plan_ranks(num_nodes=2, num_local_ranks=1, command=["x{address2}"])


def test_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = box_unavailable.__wrapped__
    monkeypatch.setattr(keeper, "_missing_capabilities", lambda: ["CAP_NET_ADMIN"])
    assert "needs root (missing here: CAP_NET_ADMIN)" in str(fresh())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in str(fresh())


@pytest.mark.usefixtures("possible")
def test_says_which_tool_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "TOOL_PATH", "/nowhere")
    assert "no ip on the PATH or in /usr/sbin; install iproute2" in str(box_unavailable.__wrapped__())


# --- nodes ---


def test_nodes_have_names_addresses_and_processes_of_their_own(box: Box) -> None:
    assert [box.address(node) for node in range(3)] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    for node in range(3):
        code = "import socket, os; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
        code += "; print(len([p for p in os.listdir('/proc') if p.isdigit()]), os.listdir('/sys/class/net'))"
        code += "; print(os.listdir('/dev/shm'), os.path.isdir('/sys/fs/cgroup'), os.getcwd())"
        said = box.run(node, [sys.executable, "-c", code], timeout_s=WAIT_S).stdout.split("\n")
        assert said[0] == f"node{node} {box.address(node)}"
        assert said[1].startswith("2 ")
        assert sorted(re.findall(r"'(\w+)'", said[1])) == ["eth0", "lo"]
        assert said[2] == f"[] True {Path.cwd()}"
    with pytest.raises(UserError, match="node 3; this box has nodes 0 to 2"):
        box.address(3)


def test_processes_have_streams_environments_exit_codes(box: Box, tmp_path: Path) -> None:
    both = box.start(
        1,
        ["sh", "-c", "read line; echo $GREETING $line; echo wrong >&2; pwd; exit 7"],
        env={"GREETING": "hello"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert both.stdin is not None
    assert both.stdout is not None
    assert both.poll() is None
    both.stdin.write(b"world\n")
    assert both.stdout.read().decode().split("\n") == ["hello world", "wrong", str(tmp_path), ""]
    assert both.wait(WAIT_S) == both.wait(0) == both.poll() == both.returncode == 7
    both.kill()

    done = box.run(0, ["sh", "-c", "echo out; echo error >&2"], timeout_s=WAIT_S)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "error\n", 0)
    big = "x" * (1 << 20)
    assert box.run(
        0, ["sh", "-c", f"head -c {1 << 21} /dev/zero | wc -c; echo {big[:100000]}"], timeout_s=WAIT_S
    ).stdout

    sleeper = box.start(2, ["sleep", "100"])
    with pytest.raises(TimeoutError, match=r"node 2: 'sleep 100' did not end within 0\.1 s"):
        sleeper.wait(0.1)
    sleeper.terminate()
    assert sleeper.wait(WAIT_S) == -signal.SIGTERM
    with pytest.raises(TimeoutError, match="node 2"):
        box.run(2, ["sleep", "100"], timeout_s=0.1)
    with pytest.raises(BoxError, match="No such file or directory: /no/such/program"):
        box.start(0, ["/no/such/program"])
    with pytest.raises(BoxError, match="No such file or directory"):
        box.start(0, ["true"], cwd="/no/such/folder")
    running = [box.start(node, ["sh", "-c", f"exit {node}"]) for node in range(3)]
    assert [process.wait(WAIT_S) for process in running] == [0, 1, 2]


def test_threads_may_share_a_box(box: Box) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(box.run(i % 3, ["echo", str(i)], timeout_s=WAIT_S).stdout))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(text) for text in found) == list(range(12))


def test_nodes_reach_each_other_and_not_the_host(box: Box) -> None:
    serve(box, 1, "sink", 5000)
    assert traffic(box, 0, "connect", box.address(1), 5000, 5) == "connected"
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family.name == "AF_INET" and not entry.address.startswith("127."):
                assert "unreachable" in traffic(box, 0, "connect", entry.address, 22, 5)
    # 127.0.0.1 is the node's own.
    assert "ConnectionRefused" in traffic(box, 0, "connect", "127.0.0.1", 5000, 5)


# --- links ---


def measured_mbit(box: Box, sender: int, receiver: int) -> float:
    """What the receiver's link carries in 1.5 s, by the bucket's own count."""
    time.sleep(0.3)
    begin, before = time.monotonic(), box.counters(receiver).down_bulk_bytes
    time.sleep(1.5)
    after, end = box.counters(receiver).down_bulk_bytes, time.monotonic()
    return (after - before) * 8e-6 / (end - begin)


def check_rate(box: Box, least_mbit: float, most_mbit: float) -> None:
    """From node 0 to node 1: never more than that, and so much as soon as the machine itself does not stand still."""
    measured: list[float] = []
    while not measured or measured[-1] <= least_mbit:
        assert len(measured) < 8, measured
        measured.append(measured_mbit(box, 0, 1))
        assert measured[-1] < most_mbit


def test_links_have_the_rate_they_were_given(possible: None) -> None:
    with Box(num_nodes=2, mbit=100) as box:
        serve(box, 1, "sink", 5000)
        serve(box, 0, "flood", box.address(1), 5000)
        check_rate(box, 50, 120)
        box.set_rate(0, 400)
        check_rate(box, 50, 120)  # the other end is still slow
        box.set_rate(1, 400)
        check_rate(box, 200, 480)


def control_round_trip_s(*, priority: bool) -> float:
    """Median, while two nodes fill the link of the third."""
    with Box(num_nodes=3, mbit=50, priority=priority) as box:
        serve(box, 2, "sink", 5000)
        serve(box, 2, "echo", 6000)
        for sender in (0, 0, 1, 1):
            serve(box, sender, "flood", box.address(2), 5000)
        time.sleep(0.7)
        median, count = traffic(box, 0, "ping", box.address(2), 6000, 60, "0x10", 2).split()
        assert int(count) >= 40
        counters = box.counters(2)
        assert (counters.down_control_bytes > 0) == priority
        assert counters.down_bulk_bytes > 1_000_000
    return float(median)


def test_control_overtakes_bulk() -> None:
    if reason := box_unavailable():
        pytest.skip(reason)
    tried: list[tuple[float, float]] = []
    while not tried or 3 * tried[-1][0] >= tried[-1][1]:
        assert len(tried) < 3, f"seconds ahead of bulk, and behind it: {tried}"
        tried.append((control_round_trip_s(priority=True), control_round_trip_s(priority=False)))


def test_a_partitioned_node_is_silent_until_healed(box: Box) -> None:
    serve(box, 1, "echo", 6000)

    def replies(node: int, timeout_s: float) -> int:
        return int(traffic(box, node, "ping", box.address(1), 6000, 3, 0, timeout_s).split()[1])

    assert replies(0, 5) == 3
    box.partition(1)
    assert replies(0, 0.2) == 0
    assert "timed out" in traffic(box, 1, "connect", box.address(0), 5000, 0.3)
    assert "refused" in traffic(box, 0, "connect", box.address(2), 5000, 5)  # others notice nothing
    box.heal(1)
    assert replies(0, 5) == 3


def test_delay_needs_netem(possible: None) -> None:
    if reason := box_unavailable(netem=True):
        assert "sch_netem" in reason
        with pytest.raises(UserError, match="sch_netem"), Box(num_nodes=1, mbit=100, delay_us=1000):
            pass
        with Box(num_nodes=2, mbit=100) as plain, pytest.raises(UserError, match="sch_netem"):
            plain.set_delay(0, 1000)
        return
    with Box(num_nodes=2, mbit=100, delay_us=20_000) as slow:
        serve(slow, 1, "echo", 6000)
        assert 0.04 <= float(traffic(slow, 0, "ping", slow.address(1), 6000, 9, 0, 5).split()[0]) < 0.2
        slow.set_delay(1, 0)
        assert 0.02 <= float(traffic(slow, 0, "ping", slow.address(1), 6000, 9, 0, 5).split()[0]) < 0.1


# --- ends ---


def marked_processes(marker: str) -> list[psutil.Process]:
    """All processes of the machine that have `marker` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if marker in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def num_sleepers(marker: str) -> int:
    """How many of them have become `sleep`; shells may come and go meanwhile."""
    names = []
    for process in marked_processes(marker):
        with suppress(psutil.Error):
            names.append(process.name())
    return names.count("sleep")


def network_namespaces(processes: Iterable[psutil.Process]) -> set[str]:
    """Those of `processes` that are not ours."""
    found = set()
    for process in processes:
        with suppress(OSError):
            found.add(str(Path(f"/proc/{process.pid}/ns/net").readlink()))
    return found - {str(Path("/proc/self/ns/net").readlink())}


def assert_nothing_is_left(marker: str, namespaces: set[str], devices: list[str]) -> None:
    wait_until(lambda: not marked_processes(marker), "all processes gone")
    # A dying process loses its environment first.
    wait_until(lambda: not network_namespaces(psutil.process_iter()) & namespaces, "all network namespaces gone")
    assert "nsfs" not in Path("/proc/self/mountinfo").read_text()
    assert sorted(psutil.net_if_addrs()) == devices


DAEMONS = "setsid sleep 1000 & (sleep 1000 &) ; exec sleep 1000"


def test_a_killed_node_takes_its_daemons_along_and_comes_back(box: Box) -> None:
    marker = f"box-test-{os.getpid()}-kill"
    process = box.start(1, ["sh", "-c", DAEMONS], env={"BOX_TEST_MARKER": marker})
    other = box.start(0, ["sleep", "100"])
    wait_until(lambda: num_sleepers(marker) == 3, "three sleepers")
    box.kill(1)
    assert process.wait(0) == -signal.SIGKILL
    assert marked_processes(marker) == []
    assert other.poll() is None
    box.start(0, ["sleep", "100"])
    serve(box, 1, "sink", 5000)
    assert traffic(box, 0, "connect", box.address(1), 5000, 5) == "connected"


def test_orphans_of_a_node_are_collected(box: Box) -> None:
    count = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    box.run(0, ["sh", "-c", "for i in 1 2 3; do (sleep 0.05 &); done"], timeout_s=WAIT_S)
    wait_until(lambda: box.run(0, [sys.executable, "-c", count], timeout_s=WAIT_S).stdout == "2\n", "orphans collected")


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_everything_ends_with_the_block(
    possible: None, error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"box-test-{os.getpid()}-block"
    monkeypatch.setenv("BOX_TEST_MARKER", marker)
    devices = sorted(psutil.net_if_addrs())
    box = Box(num_nodes=2, mbit=100)
    with suppress(RuntimeError, KeyboardInterrupt), box:
        process = box.start(0, ["sh", "-c", DAEMONS])
        new = network_namespaces(marked_processes(marker))
        assert len(new) == 3  # two nodes and the switch
        if error is not None:
            raise error
    assert_nothing_is_left(marker, new, devices)
    assert process.wait(0) == -signal.SIGKILL
    with pytest.raises(BoxError, match="the box is closed"):
        box.start(0, ["true"])


# The owner forks a child that inherits every descriptor and outlives it: the keeper must not be fooled.
OWNER_WITH_HEIR = """
import os, sys, time
from antiphon.bench.box import Box
with Box(num_nodes=2, mbit=100) as box:
    box.start(0, ["sh", "-c", sys.argv[1]])
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    time.sleep(1000)
"""


@pytest.mark.parametrize("kind", ["command", "heir", "keeper", "group"])
def test_nothing_survives_a_kill_of(possible: None, kind: str) -> None:
    marker = f"box-test-{os.getpid()}-{kind}"
    devices = sorted(psutil.net_if_addrs())
    command = [sys.executable, SCRIPT, "--nodes", "2", "--mbit", "100", "--", "sh", "-c", DAEMONS]
    if kind == "heir":
        command = [sys.executable, "-c", OWNER_WITH_HEIR, DAEMONS]
    env = {**os.environ, "BOX_TEST_MARKER": marker, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    num_sleeping = 3 if kind == "heir" else 6
    try:
        wait_until(lambda: num_sleepers(marker) == num_sleeping, f"{num_sleeping} sleepers")
        new = network_namespaces(marked_processes(marker))
        assert len(new) == 3
        if kind == "group":
            os.killpg(owner.pid, signal.SIGKILL)
        elif kind == "keeper":
            psutil.Process(owner.pid).children()[0].kill()
        else:
            owner.kill()
        code = owner.wait(WAIT_S)
    finally:
        owner.kill()
    # 1: the others could not be asked to end, because the keeper was gone before their end was seen.
    assert code in ({128 + signal.SIGKILL, 1} if kind == "keeper" else {-signal.SIGKILL})
    if kind == "heir":
        wait_until(lambda: num_sleepers(marker) == 0, "sleepers gone")
        assert marked_processes(marker), "the heir was to outlive them"
    assert_nothing_is_left(marker, new, devices)


# --- the command ---


@pytest.mark.usefixtures("possible")
def test_command_runs_every_rank_with_its_numbers() -> None:
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('BOX_')}))"
    arguments = ["--nodes", "2", "--mbit", "100", "--procs-per-node", "2", "--", sys.executable, "-c"]
    done = box_command(*arguments, code + "; import sys; sys.stderr.write('no newline')")
    assert done.returncode == 0, done.stderr
    found = {int(line[1]): json.loads(line[4:]) for line in done.stdout.splitlines()}
    assert {rank: env["BOX_NODE"] for rank, env in found.items()} == {0: "0", 1: "0", 2: "1", 3: "1"}
    assert {env["BOX_ADDRESSES"] for env in found.values()} == {"10.77.0.1,10.77.0.2"}
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] no newline" for rank in range(4)]


@pytest.mark.usefixtures("possible")
def test_command_ends_all_when_one_fails(tmp_path: Path) -> None:
    fails = f"if [ {{rank}} = 1 ]; then until [ -e {tmp_path}/0 -a -e {tmp_path}/2 ]; do sleep 0.05; done; exit 3; fi"
    script = f"{fails}; trap 'echo asked; exit 0' TERM; sleep 100 & : > {tmp_path}/{{rank}}; wait"
    done = box_command("--nodes", "3", "--mbit", "100", "--", "sh", "-c", script)
    assert done.returncode == 3
    assert "box: rank 1 (node 1) ended with exit code 3; ending 2 other ranks" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] asked", "[2] asked"]
    killed = box_command("--nodes", "1", "--mbit", "100", "--", "sh", "-c", "kill -KILL $$")
    assert (killed.returncode, "rank 0 (node 0) ended with SIGKILL" in killed.stderr) == (137, True)
    stubborn = "trap '' TERM; if [ {rank} = 1 ]; then exit 4; fi; while true; do sleep 1; done"
    begin = time.monotonic()
    assert box_command("--nodes", "2", "--mbit", "100", "--", "sh", "-c", stubborn).returncode == 4
    assert time.monotonic() - begin < 20
    missing = box_command("--nodes", "1", "--mbit", "100", "--", "/no/such/program")
    assert (missing.returncode, missing.stderr) == (1, "box: No such file or directory: /no/such/program\n")


@pytest.mark.usefixtures("possible")
def test_command_has_a_timeout_and_ends_with_its_client() -> None:
    late = box_command("--nodes", "2", "--mbit", "100", "--timeout", "0.5", "--", "sleep", "100")
    assert (late.returncode, "box: ranks 0, 1 had not ended within 0.5 s" in late.stderr) == (124, True)
    server = f"0:{sys.executable} -c 'import socket, time; s = socket.create_server((\"\", 80)); time.sleep(100)'"
    client = """
import socket, sys, time
for attempt in range(100):
    try:
        socket.create_connection((sys.argv[1], 80), timeout=5)
        sys.exit(print("connected"))
    except OSError:
        time.sleep(0.05)
sys.exit(5)
"""
    arguments = ["--nodes", "2", "--mbit", "100", "--node-command", server, "--until", "1", "--", sys.executable, "-c"]
    done = box_command(*arguments, client, "{address0}")
    assert (done.stdout, done.stderr, done.returncode) == ("[1] connected\n", "", 0)


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_ends_politely_when_asked(number: signal.Signals) -> None:
    marker = f"box-test-{os.getpid()}-{number}"
    command = [sys.executable, SCRIPT, "--nodes", "2", "--mbit", "100", "--", "sh", "-c"]
    command.append("trap 'echo asked; exit 0' TERM; echo there; sleep 100 & wait")
    env = {**os.environ, "BOX_TEST_MARKER": marker}
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert sorted(running.stdout.readline() for _ in range(2)) == ["[0] there\n", "[1] there\n"]
    running.send_signal(number)
    out, error = running.communicate(timeout=WAIT_S)
    assert sorted(out.splitlines()) == ["[0] asked", "[1] asked"]
    assert (running.returncode, "interrupted; ending 2 other ranks" in error) == (128 + number, True)
    wait_until(lambda: not marked_processes(marker), "all processes gone")


def test_command_says_in_one_line_what_is_wrong() -> None:
    wrong = box_command("--nodes", "2", "--mbit", "0", "--", "true")
    if box_unavailable() is None:
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    none = box_command("--nodes", "2", "--mbit", "100")
    assert (none.returncode, none.stderr) == (
        2,
        "box: no command for node 0; give one after -- or with --node-command\n",
    )
    far = box_command("--nodes", "2", "--mbit", "100", "--until", "2", "--", "true")
    assert (far.returncode, far.stderr) == (2, "box: --until 2: this box has nodes 0 to 1\n")
    code = "import runpy; from antiphon.bench.box import keeper; keeper.TOOL_PATH = ''"
    command = [sys.executable, "-c", f"{code}; runpy.run_path({SCRIPT!r}, run_name='__main__')"]
    command += ["--nodes", "1", "--mbit", "1", "--", "true"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("box: a box ")


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(value.item(), dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("possible")
def test_torch_distributed_works_as_it_is() -> None:
    done = box_command("--nodes", "2", "--mbit", "400", "--timeout", "50", "--", sys.executable, "-c", GLOO)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 3.0 2", "[1] 3.0 2"]), done.stderr
