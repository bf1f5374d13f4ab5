"""Text that is tokenized beside the steps: the order of its samples, kills, ranks, and text that cannot be read."""

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.base.system import one_writer
from antiphon.models.config import load_model_spec
from antiphon.train import setup, token_stream
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.samples import StreamedSamples
from antiphon.train.setup import prepare, prepare_data, stream_of, tokenizer_of
from antiphon.train.token_stream import StreamWriter, TokenStream
from antiphon.train.tokens import Written
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.train.harness import LINES, losses, same_tensors, write_run
from tests.train.test_run_kills import PATIENCE_S, command

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = ("data.stream_tokens=200",)
WHERE = torch.device("cpu")


def streamed(folder: Path, *changes: str) -> TokenStream:
    """A run's text, its first block written."""
    file = folder / "train.toml"
    config = read_config(file if file.exists() else write_run(folder), (*BLOCKS, *changes))
    prepare_data(config, load_model_spec(Path(config.model.path)))
    return stream_of(config)


def two_sources(folder: Path) -> Path:
    """Three quarters of numbered records, one of chats as prompts and answers."""
    file = write_run(folder)
    text = file.read_text().replace('files = ["text/*.txt"]\n', "")
    records = [{"text": f"{number} {LINES[number % 4]}"} for number in range(90)]
    answers = [{"prompt": f"{number} ", "answer": LINES[number % 4][: 4 + number % 9]} for number in range(70)]
    for name, rows in (("records", records), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [("records", "text", 3.0), ("answers", "answers", 1.0)]
    text += "".join(
        f'[[data.sources]]\nname = "{name}"\nkind = "{kind}"\nfiles = ["{name}.jsonl"]\nweight = {weight}\n'
        for name, kind, weight in sources
    )
    file.write_text(text)
    return file


def seen(samples: StreamedSamples, num: int) -> list[tuple[int, ...]]:
    """The ids of samples 0 to `num`, with what is learned."""
    found = []
    for number in range(num):
        batch = samples.batch([number], WHERE)
        found.append((*batch.ids_BS[0].tolist(), *batch.targets_BS[0].tolist()))
    return found


def writing_when_asked(stream: TokenStream) -> StreamedSamples:
    """Samples of a text of which a block is written only when a rank waits for it."""
    turns = [stream._writing(each, lambda done, total: None) for each in stream.sources]

    def write_more() -> None:
        for each in turns:
            next(each, None)

    return StreamedSamples(stream, write_more)


def test_each_window_is_seen_once_a_pass_and_passes_differ(tmp_path: Path) -> None:
    stream = streamed(tmp_path)
    stream.write_all()
    samples, num_ids = StreamedSamples(stream), stream.written(0).num_ids
    num = (num_ids - 1) // 16
    passes = [seen(samples, 2 * num)[turn * num : (turn + 1) * num] for turn in range(2)]
    assert Counter(passes[0]) == Counter(passes[1])
    assert passes[0] != passes[1]
    block = stream.sources[0].block_tokens
    assert num_ids > 5 * block, "several blocks"
    whole = [tuple(stream.block(0, each).ids[place : place + 16].tolist())
             for each in range(num_ids // block + 1) for place in range(0, block, 16)]  # fmt: skip
    whole = [each for each in whole if len(each) == 16][:num]
    assert Counter(each[:16] for each in passes[0]) == Counter(whole)


@pytest.mark.parametrize("write", [write_run, two_sources])
def test_the_order_is_the_same_whenever_ids_are_written(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    write(tmp_path / "first"), write(tmp_path / "second")
    early, late = streamed(tmp_path / "first"), streamed(tmp_path / "second")
    early.write_all()
    expected = seen(StreamedSamples(early), 500)
    assert seen(writing_when_asked(late), 500) == expected
    assert early.digest == late.digest
    assert early.held_out().ids.tolist() == late.held_out().ids.tolist()
    together = StreamedSamples(early).batch(range(40, 60), WHERE)  # as a rank that goes on there
    both = zip(together.ids_BS.tolist(), together.targets_BS.tolist(), strict=True)
    assert [(*ids, *targets) for ids, targets in both] == expected[40:60]


def test_weights_are_shares_of_the_samples(tmp_path: Path) -> None:
    two_sources(tmp_path)
    stream = streamed(tmp_path)
    assert [each.per_round for each in stream.sources] == [3072, 1024]
    places = [StreamedSamples(stream)._round(turn)[0] for turn in range(2)]
    assert [int((each == 1).sum()) for each in places] == [1024, 1024]
    assert places[0].tolist() != places[1].tolist()
    assert 10 < int((places[0][:100] == 1).sum()) < 45, "mixed"


def test_a_run_has_the_bits_of_one_whose_text_was_written_before(tmp_path: Path) -> None:
    """The second one writes beside its steps, ends behind step 3 and goes on in a new process's place."""
    changes = (*BLOCKS, "output.evaluate_every=2", "steps=40", "output.checkpoint_every=3")
    stream_of(read_config(write_run(tmp_path / "before"), changes)).prepare()
    stream_of(read_config(tmp_path / "before/train.toml", changes)).write_all()
    models = []
    for name, steps in (("before", 40), ("beside", 3), ("beside", 40)):
        file = tmp_path / name / "train.toml"
        config = read_config(file if file.exists() else write_run(tmp_path / name), (*changes, f"steps={steps}"))
        trainer = Trainer(prepare(_with_schedule(config)))
        trainer.run()
        models.append(trainer.model)
    assert same_tensors(models[0], models[2])
    assert losses(tmp_path / "before") == losses(tmp_path / "beside")


def _with_schedule(config: TrainConfig) -> TrainConfig:
    return replace(config, optimizer=replace(config.optimizer, schedule_steps=40))


def test_text_that_cannot_be_read_ends_the_run_behind_a_checkpoint(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    (tmp_path / "text/999.txt").write_bytes(b"\xff\xfe broken")
    stream = stream_of(read_config(file, BLOCKS))
    last = list(stream.sources[0].files).index(tmp_path / "text/999.txt")
    assert last > 8, "the seed's order has it behind the first block"
    trainer = Trainer(prepare(read_config(file, (*BLOCKS, "steps=4000", "output.checkpoint_every=0"))))
    with pytest.raises(UserError, match=r"999\.txt: not UTF-8 text"):
        trainer.run()
    assert trainer.state.step > 0
    assert (tmp_path / f"out/checkpoints/step-{trainer.state.step:08}").is_dir()
    (tmp_path / "text/999.txt").write_text("mended\n")  # other text from here on: said, not guessed
    with pytest.raises(UserError, match=r"other text .*stream_tokens"):
        prepare(read_config(file, (*BLOCKS, "steps=4000")))


def test_a_file_system_that_times_out_is_not_a_text_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = streamed(tmp_path)

    def written(self: TokenStream, number: int) -> Written:
        raise TimeoutError(errno.ETIMEDOUT, "the network mount is gone")

    monkeypatch.setattr(TokenStream, "written", written)
    with pytest.raises(TimeoutError, match="network mount"):
        StreamedSamples(stream).are_there(range(10), 0.0)


def test_a_writer_that_dies_and_one_that_writes_nothing_are_named(tmp_path: Path) -> None:
    stream = streamed(tmp_path)
    samples = StreamedSamples(stream, timeout_s=0.2)
    assert samples.are_there(range(10), 0.0)
    assert not samples.are_there(range(60), 0.0)
    with pytest.raises(ResourceError, match=r"block 1 of source 'files' is not there, and tokenizing .* for 200"):
        samples.are_there(range(60), 60.0)
    writer = StreamWriter(stream)
    assert writer._process is not None
    writer._process.send_signal(signal.SIGKILL)
    writer._process.wait()
    with pytest.raises(UserError, match="tokenizing beside the steps ended by signal 9"):
        StreamedSamples(stream, writer.check).batch([60], WHERE)
    writer.close()


def test_a_signal_ends_a_run_that_waits_for_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing writes, so the steps end with the first block."""
    silent = SimpleNamespace(check=lambda: None, close=lambda: None)
    monkeypatch.setattr(setup, "StreamWriter", lambda stream: silent)
    config = read_config(write_run(tmp_path), (*BLOCKS, "steps=4000", "output.checkpoint_every=0"))
    trainer = Trainer(prepare(config))

    def send() -> None:
        while not trainer.state.step:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    facts = trainer.run()
    sender.join(PATIENCE_S)
    assert facts["stopped_by"] == "SIGTERM"
    assert 0 < facts["steps"] < 20
    assert Path(facts["checkpoint"]).name == f"step-{facts['steps']:08}"


def test_the_writer_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = streamed(tmp_path)
    writer = StreamWriter(stream)
    process: Any = writer._process
    process.stdin.close()  # what the kernel does when the first rank is killed
    assert process.wait(PATIENCE_S) in (0, 1)
    writer.close()
    monkeypatch.setattr(token_stream, "WRITER_S", 0.1)
    with one_writer(stream.folder, "not free"), pytest.raises(UserError, match="another run writes token ids there"):
        stream.write_all()
    stream.write_all()
    assert stream.is_whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.stream_tokens=-1", "stream_tokens"),
        ("data.stream_tokens=1.5", "stream_tokens"),
        (
            'data.sources=[{name="a", files=["text/*.txt"], epochs=2.0}]',
            "stream_tokens is 200 and .*'a' has epochs",
        ),
        ("sequence_length=40000", "max|positions|sequence"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: str, message: str) -> None:
    file = write_run(tmp_path)
    if "sources" in change:
        file.write_text(file.read_text().replace('files = ["text/*.txt"]\n', ""))
    changes = (*BLOCKS, change)
    with pytest.raises(UserError, match=message):
        prepare(read_config(file, changes))


def test_a_source_shorter_than_a_sequence_is_named(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    for each in (tmp_path / "text").iterdir():
        each.unlink()
    (tmp_path / "text/one.txt").write_text("cat")
    config = read_config(file, (*BLOCKS, "data.held_out=0.0"))
    prepare_data(config, load_model_spec(Path(config.model.path)))
    with pytest.raises(UserError, match=r"source 'files' has . tokens, sequence_length is 16"):
        StreamedSamples(stream_of(config)).batch([0], WHERE)
    assert tokenizer_of(config).name == "model"


def run_command(file: Path, *changes: str, ranks: int = 1) -> None:
    started = [*command(file, *changes), "--nproc", str(ranks)] if ranks > 1 else command(file, *changes)
    ended = PROGRAMS.run(started, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_ranks_that_come_and_go_see_the_same(tmp_path: Path) -> None:
    """One process, against 2 ranks, then 4, then 1; float64 leaves no room for another sample."""
    fixed = (*BLOCKS, "dtype=float64", "steps=24", "optimizer.schedule=constant", "output.checkpoint_every=0")
    for name in ("alone", "shared"):
        two_sources(tmp_path / name)
    run_command(tmp_path / "alone/train.toml", *fixed)
    for steps, ranks in ((8, 2), (16, 4), (24, 1)):
        run_command(tmp_path / "shared/train.toml", *fixed, f"steps={steps}", ranks=ranks)
    alone, shared = (dict(losses(tmp_path / name)) for name in ("alone", "shared"))
    assert shared == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
def test_runs_that_are_killed_while_they_tokenize_go_on(tmp_path: Path) -> None:
    changes = (*BLOCKS, "steps=60", "output.checkpoint_every=2")
    whole = Trainer(prepare(read_config(write_run(tmp_path / "whole"), changes)))
    whole.run()
    file = write_run(tmp_path / "killed")
    for turn in range(6):
        with PROGRAMS.Popen(
            command(file, *changes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:  # fmt: skip
            deadline = time.monotonic() + PATIENCE_S
            progress = tmp_path / "killed/out/tokens/stream/00/progress.json"
            while process.poll() is None and not (progress.exists() and turn < 3):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.2 * (turn % 3))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
    ended = Trainer(prepare(read_config(file, changes)))
    ended.run()
    assert same_tensors(ended.model, whole.model)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
