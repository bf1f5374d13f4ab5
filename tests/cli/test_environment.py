"""What companies do to a command's environment: proxies, no home, other locales, folders that cannot be written, a
small /dev/shm, modules in the working folder. A cheap command in several at once; all commands in each in the slow
lane."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from antiphon.base.system import python_module
from antiphon.bench.openai_peer import OpenAIPeer
from antiphon.cli.top import top
from tests.serve.api_harness import fake_engine, live
from tests.train.harness import write_run

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-m", "antiphon.cli.main")
DEMO = str(ROOT / "examples" / "demo-moe")
NOT_SET = "-"
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "proxies": {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5h://x", "NO_PROXY": "["},
    "no home": {"HOME": NOT_SET, "USER": NOT_SET, "LOGNAME": NOT_SET},
    "a home that is not there": {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "TMPDIR": "/proc/none"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb"},
    "a locale that is not installed": {"LC_ALL": "tr_TR.UTF-8", "PYTHONIOENCODING": "latin-1", "NO_COLOR": "1"},
    "strict": {"PYTHONWARNINGS": "error", "PYTHONHASHSEED": "7", "PYTHONPATH": "/proc/none", "MALLOC_ARENA_MAX": "1"},
    "threads": {"OMP_NUM_THREADS": "1"},
}
SLOW = {
    "list": ("plan", "--list"),
    "plan": ("plan", "dbrx", "--cluster", "msi-ampere"),
    "top": ("top", "http://127.0.0.1:1", "--once"),  # has no server: one line says so
    "doctor": ("doctor",),
    "generate": ("generate", DEMO, "--prompt", "Once", "--max-tokens", "4"),
    "disaggregated": ("generate", DEMO, "--prompt", "Once", "--max-tokens", "4", "--layout", "disaggregated"),
    "worker": ("worker", "--role", "experts", "--join", "127.0.0.1:1", "--patience", "1"),
    "bench m2n": ("bench", "m2n", "--help"),
    "reproduce": ("reproduce", "--help"),
    "simulate": ("simulate", "none.json"),
    "placement": ("placement", "none"),
    "export": ("export", "none", "none"),
}  # fmt: skip
EXPECTED = {"top": 2, "simulate": 2, "placement": 2, "export": 1, "worker": 1}


def run(
    arguments: tuple[str, ...], changes: Mapping[str, str], folder: Path, *before: str
) -> "subprocess.CompletedProcess[str]":
    """As a program: what a shell or a container sets is read while Python starts. `before`: a shell's words."""
    environment = {name: value for name, value in (os.environ | changes).items() if value != NOT_SET}
    command = [*COMMAND, *arguments]
    if before:
        command = ["unshare", "-m", "sh", "-c", f'{"; ".join(before)}; exec "$@"', "sh", *command]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False, timeout=300,
        encoding="utf-8", errors="replace",
    )  # fmt: skip


def check(ended: "subprocess.CompletedProcess[str]", name: str) -> None:
    said = ended.stderr
    assert "Traceback" not in said, said
    assert "--debug shows where" not in said, said  # an error that the program did not expect
    assert ended.returncode in (EXPECTED.get(name, 0), *([2] if name in EXPECTED else [])), said


@pytest.mark.parametrize(
    "names",
    [
        ("proxies", "a home that is not there", "ascii", "threads"),
        ("proxies", "no home", "a locale that is not installed", "strict"),
    ],
    ids=" and ".join,
)
def test_a_cheap_command(names: tuple[str, ...], tmp_path: Path) -> None:
    changes = {name: value for each in names for name, value in ENVIRONMENTS[each].items()}
    check(run(("plan", "--list"), changes, tmp_path), "plan")


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("command", SLOW)
def test_commands(command: str, environment: str, tmp_path: Path) -> None:
    check(run(SLOW[command], ENVIRONMENTS[environment], tmp_path), command)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_no_module_of_the_working_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('of the working folder')\n")
    monkeypatch.chdir(tmp_path)
    command = python_module("antiphon.serve.text.grammar_trial")
    ended = subprocess.run(command, input=b"", capture_output=True, check=False, timeout=60)
    assert b"of the working folder" not in ended.stderr
    monkeypatch.chdir(ROOT)
    assert "-P" not in python_module("json.tool")  # where it may be the only place to find Antiphon


def test_a_working_folder_that_was_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd "{gone}"; rmdir "{gone}"; exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND, "doctor"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: the working folder cannot be used (No such file or directory): change to one that exists\n"
    )


MOUNTS_UNAVAILABLE = os.geteuid() != 0 or subprocess.run(
    ["unshare", "-m", "sh", "-c", "mount -t tmpfs x /dev/shm"], capture_output=True, check=False
).returncode != 0  # fmt: skip
mounts = pytest.mark.skipif(MOUNTS_UNAVAILABLE, reason="file systems can only be mounted by root")
READ_ONLY = "for folder in /tmp /var/tmp /root /home /dev/shm; do if [ -d $folder ]; then mount --bind $folder $folder"
READ_ONLY += "; mount -o remount,bind,ro $folder; fi; done"
FULL = "mount -t tmpfs -o size=64k x /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=1k 2>/dev/null || true"


@mounts
@pytest.mark.slow
@pytest.mark.parametrize("before", [READ_ONLY, FULL, "mount -t tmpfs x /proc", "mount -t tmpfs x /sys"])
@pytest.mark.parametrize("command", ["doctor", "generate", "disaggregated"])
def test_file_systems(command: str, before: str, tmp_path: Path) -> None:
    if command == "disaggregated" and before.endswith("/proc"):
        pytest.skip("the exchange between workers passes descriptors by /proc")
    check(run(SLOW[command], {}, ROOT, before), command)


@mounts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("mount -t tmpfs -o ro x /dev/shm", "Read-only file system"),
        ("mount -t tmpfs -o size=4k x /dev/shm; dd if=/dev/zero of=/dev/shm/x bs=4k 2>/dev/null || true", "No space"),
    ],
)
def test_ranks_without_room_for_semaphores(tmp_path: Path, before: str, reason: str) -> None:
    ended = run(("train", str(write_run(tmp_path)), "--nproc", "2"), {"OMP_NUM_THREADS": "1"}, tmp_path, before)
    assert ended.returncode == 1
    assert "error: --nproc 2 needs semaphores, and /dev/shm cannot hold them" in ended.stderr
    assert reason in ended.stderr
    assert "or start torchrun --nproc-per-node 2" in ended.stderr


# --- proxies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense", "ftp://x"])
def test_our_own_clients_reach_a_server_directly(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(fake_engine()) as server:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        top(server.url, once=True)
        assert OpenAIPeer(server.url).start()["url"] == server.url
        monkeypatch.undo()  # the harness closes its own clients
