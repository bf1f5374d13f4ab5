"""Moments and experts in a mapped file: the bits of a run without it, and what the process holds."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.models.config import load_model_spec
from antiphon.train import checkpoint_parts, offload
from antiphon.train.memory import memory_need, setup_of
from antiphon.train.offload import MappedParts
from antiphon.train.ranks import sizes_of
from antiphon.train.setup import check_device, prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of, losses

WIDE = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, "num_hidden_layers": 6}


def run(folder: Path, *changes: str) -> list[dict[str, object]]:
    Trainer(prepare(config_of(folder, "optimizer.warmup_steps=1", *changes, **WIDE))).run()
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_runs_have_the_bits_of_one_in_memory_and_hold_less(tmp_path: Path) -> None:
    """Also one that goes on from a checkpoint of the other. Behind a step the process holds next to nothing of what is
    mapped."""
    plain = run(tmp_path / "none")
    for kind in ("moments", "experts"):
        lines = run(tmp_path / kind, f"memory.offload={kind}")
        assert losses(tmp_path / kind) == losses(tmp_path / "none"), kind
        steps = [line for line in lines if "loss" in line]
        assert [line["gradient_norm"] for line in steps] == [line["gradient_norm"] for line in plain if "loss" in line]
        mapped, held = steps[3]["offloaded_bytes"], steps[3]["offloaded_resident_bytes"]
        assert isinstance(mapped, int)
        assert isinstance(held, int)
        assert mapped > 4_000_000
        assert held < mapped / 4, kind
    go_on = ("memory.offload=moments", "steps=8")
    run(tmp_path / "experts", *go_on)
    run(tmp_path / "none", "steps=8")
    assert losses(tmp_path / "experts") == losses(tmp_path / "none")
    assert not list((tmp_path / "experts").rglob("tmp*")), "the file has no name"


def test_a_save_makes_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mapped state, and where steps wait for checkpoints anyway; behind it nothing of the file is held."""

    def none(view: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a copy")

    copied = checkpoint_parts.host_copy
    monkeypatch.setattr(checkpoint_parts, "host_copy", none)
    run(tmp_path / "a", "output.save_beside=false")
    trainer = Trainer(prepare(config_of(tmp_path / "b", "memory.offload=experts", "optimizer.warmup_steps=1", **WIDE)))
    trainer.run()
    assert sum(each.resident_bytes for each in trainer._optimizer.mapped) == 0
    monkeypatch.setattr(checkpoint_parts, "host_copy", copied)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for folder in ("a", "b"):
        run(tmp_path / folder, "steps=7")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_what_is_given_up_comes_back(tmp_path: Path) -> None:
    parts = MappedParts(tmp_path, 1_000_000)
    rooms = []
    for part in (0, 1):
        parts.begin(part)
        rooms.append(parts.room(100_000, torch.float32))
    rooms[0].fill_(3.0)
    rooms[1].fill_(4.0)
    assert parts.resident_bytes >= 800_000
    parts.give_up(0)
    assert parts.resident_bytes < 500_000
    parts.fetch(0)
    assert float(rooms[0].sum()) == 300_000.0
    parts.fetch(7)  # there is none of that number
    assert float(rooms[1].min()) == 4.0


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    with pytest.raises(ResourceError, match=r"memory.offload needs 4.0 KiB in .*, 100 B are free: make room, name"):
        MappedParts(tmp_path, 4096)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"memory.offload: .*/file/x cannot be used \(Not a directory\): name"):
        MappedParts(tmp_path / "file/x", 4096)


def test_a_disk_that_another_rank_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(offload.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"needs 4.0 KiB in .* for each rank there, and it has no more \(No space"):
        MappedParts(tmp_path, 4096)


def test_what_a_rank_needs_is_less(tmp_path: Path) -> None:
    need = {}
    for kind in ("none", "moments", "experts"):
        config = config_of(tmp_path / kind, f"memory.offload={kind}", **WIDE)
        spec = load_model_spec(Path(config.model.path))
        need[kind] = memory_need(spec, config, setup_of(config, sizes_of(config, spec, 1)))
    assert need["moments"].optimizer == pytest.approx(need["none"].optimizer / 3)
    assert need["moments"].parameters == need["none"].parameters
    assert need["experts"].parameters < 0.6 * need["none"].parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("memory.offload=disk",), "offload is 'disk': it must be 'none', 'moments' or 'experts'"),
        (("memory.offload_folder=x",), "offload_folder is .*x and offload is 'none', so nothing would lie there"),
        (("memory.offload=moments", "optimizer.name=muon"), "offload is 'moments' and optimizer.name is 'muon', which"),
        (("memory.offload=experts", "parallel.zero=1"), "offload is 'experts' and parallel.zero is 1, which keeps"),
    ],
)
def test_what_cannot_be(tmp_path: Path, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, *changes)


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"memory.offload maps the memory of the processor, and the run computes on cuda"
    ):
        check_device(config_of(tmp_path, "memory.offload=moments"), torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"memory.reuse_rows is true and the device is cuda:0, whose allocator does"):
        check_device(config_of(tmp_path, "memory.reuse_rows=true"), torch.device("cuda", 0))
