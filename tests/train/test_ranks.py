"""How ranks come together, and what the others say and keep when one ends."""

import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from antiphon.base.errors import ResourceError, UserError
from antiphon.comm.mesh import Sizes
from antiphon.train import checkpoint
from antiphon.train.config_tables import CommunicationConfig
from antiphon.train.ranks import join
from antiphon.train.run_folder import OutputLock
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import config_of, write_run

TWO, SHORT = Sizes(world_size=2), CommunicationConfig(timeout_s=2.0)
RANK = """
import os, sys
from pathlib import Path
from antiphon.train import checkpoint
from antiphon.train.config import read_config
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer

checkpoint._SEEN_S = 0.5
run, last = prepare(read_config(Path(sys.argv[1]), sys.argv[3:])), int(sys.argv[2])

def end_behind(step):
    if run.mesh.rank and step == last:
        os._exit(9)

end_behind(-1)
Trainer(run, lambda result: end_behind(result.step)).run()
"""


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a socket that listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


def as_rank(monkeypatch: pytest.MonkeyPatch, number: str, port: str) -> None:
    for name, value in (("RANK", number), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)


def test_a_port_that_is_taken_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with PROGRAMS.Popen(
        [sys.executable, "-c", "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1]); input()"],
        stdin=-1,
        stdout=-1,
        text=True,
    ) as other:
        port = other.stdout.readline().strip()
        as_rank(monkeypatch, "0", port)
        words = rf"MASTER_PORT {port}: rank 0 cannot listen there \(Address already in use by process {other.pid}\)"
        with pytest.raises(UserError, match=words):
            join(TWO)
        other.kill()


def test_a_rank_says_what_it_finds_in_the_place_of_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listener: int
) -> None:
    for port, found in ((listener, "something listens that does not answer"), (free_port(), "nothing listens")):
        as_rank(monkeypatch, "1", str(port))
        with pytest.raises(ResourceError, match=f"store of rank 0 at 127.0.0.1:{port}, where {found}"):
            join(TWO, SHORT)
        assert f"rank 1 waits for rank 0 at 127.0.0.1:{port}, where {found}" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "", "RANK is not set: it must be a number from 0 to 1: start ranks with --nproc"),
        ("RANK", "2", "RANK is '2': it must be a number from 0 to 1"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two': it must be a number from 1"),
        ("MASTER_PORT", "99999", "MASTER_PORT is '99999': it must be a number from 1 to 65535"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set: rank 1 of 2"),
    ],
)
def test_variables_that_say_no_rank(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    as_rank(monkeypatch, "1", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        join(TWO, SHORT)


@pytest.mark.parametrize(
    ("refusing", "change", "words"),
    [
        ("0", "sequence_length=65", "rank 0 does not begin: sequence_length is 65, the model's positions end at 64"),
        ("1", "sequence_length=65", "rank 1 does not begin: sequence_length is 65, the model's positions end at 64"),
        (
            "0",
            'data.files=["nothing/*"]',
            "rank 0 could not write the token ids: data.files: .*nothing/.* names no file",
        ),
        ("0", "", "rank 0 does not begin: output.folder .*out is in use by process"),
    ],
)
def test_what_one_rank_refuses_the_other_says(tmp_path: Path, refusing: str, change: str, words: str) -> None:
    """Ranks that no launcher started waited for it, as long as `timeout_s`."""
    file = write_run(tmp_path)
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), "--set", "communication.timeout_s=3600"]
    with ExitStack() as stack:
        if not change:
            stack.callback(OutputLock(tmp_path / "out").close)
        changed = [*command, *(["--set", change] if change else [])]
        one = stack.enter_context(PROGRAMS.Popen(changed, env=environment | {"RANK": refusing}, stdout=-3, stderr=-3))
        other_rank = "1" if refusing == "0" else "0"
        other = PROGRAMS.run(command, env=environment | {"RANK": other_rank}, text=True, timeout=120)
        assert one.wait(60) == other.returncode == 2
    assert re.search(words, other.stderr), other.stderr


def two_ranks(file: Path, last: int, *changes: str, second: Sequence[str] = (), code: int = 9, limits: str = "") -> str:
    """What the first of two ranks said, whose other one ends behind step `last`, with `code`; `second`: what it has
    otherwise; `limits`: a line of Python that sets both's."""
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", limits + RANK, str(file), str(last), *changes]
    with PROGRAMS.Popen([*command, *second], env=os.environ | places | {"RANK": "1"}, stdout=-3, stderr=-3) as other:
        first = PROGRAMS.run(command, env=os.environ | places | {"RANK": "0"}, text=True, timeout=120)
        assert other.wait(60) == code
    return str(first.stderr) + str(first.stdout)


def test_a_rank_that_ends_while_a_checkpoint_is_written_or_read(tmp_path: Path) -> None:
    """The others name it in words of ours, and what is there is not taken for damaged."""
    file, changes = write_run(tmp_path), ("data.held_out=0.0", "optimizer.schedule=constant", "output.keep=3")
    said = two_ranks(file, 5, *changes)
    assert "step-00000006 is not written: rank 0 waited for checkpoint.all_reduce, and rank 1 (process " in said
    assert "gloo" not in said.partition("Traceback")[0]
    folder = tmp_path / "out/checkpoints"
    assert (folder / "step-00000003").exists()
    Trainer(prepare(config_of(tmp_path, *changes))).run()
    said = two_ranks(file, -1, *changes, "steps=9")
    assert "ended: see what that one said" in said
    assert sorted(each.name for each in folder.iterdir()) == ["step-00000003", "step-00000006"]


def test_ranks_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    """By default that is 1,024 of them, which some hundred ranks need for their connections."""
    few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (36, r.getrlimit(r.RLIMIT_NOFILE)[1]))"
    said = two_ranks(write_run(tmp_path), 9, "parallel.expert=2", code=0, limits=few)
    assert "Too many open files" not in said
    assert (tmp_path / "out/checkpoints/step-00000006").exists()


def test_machines_have_to_share_the_folder(tmp_path: Path) -> None:
    """Each rank wrote its part where it is, and the checkpoint was taken for whole."""
    file, folder = write_run(tmp_path), tmp_path / "out/checkpoints"
    shared = (f"data.cache={tmp_path / 'tokens'}", "parallel.expert=2")
    elsewhere = [f"output.folder={tmp_path / 'elsewhere'}"]
    said = two_ranks(file, 9, *shared, second=elsewhere, code=1)
    assert "step-00000006: cannot be written (__1_0.distcp of another rank is not here: output.folder has to" in said
    assert not list(folder.iterdir())
    two_ranks(file, 9, *shared, code=0)
    said = two_ranks(file, 9, *shared, "steps=9", second=elsewhere, code=1)
    assert "step-00000006 is there for rank 0 and not for rank 1: output.folder has to be one folder" in said


def test_a_checkpoint_that_cannot_be_opened_now_is_not_put_aside(tmp_path: Path) -> None:
    changes = ("optimizer.schedule=constant",)
    Trainer(prepare(config_of(tmp_path, *changes))).run()
    trainer = Trainer(prepare(config_of(tmp_path, *changes, "steps=9")))
    trainer._build()
    limits, newest = resource.getrlimit(resource.RLIMIT_NOFILE), tmp_path / "out/checkpoints/step-00000006"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        with pytest.raises(ResourceError, match=r"step-00000006: cannot be loaded now .*Too many open files"):
            checkpoint.load(newest, trainer.model, trainer._shards, trainer._optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    trainer.run()
    assert trainer.state.step == 9
    assert newest.exists()
