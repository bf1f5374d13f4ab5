"""`antiphon bench train`: equal losses first, rows with the names others rely on, and what it refuses. No times."""

import json
import sys
from pathlib import Path

import pytest
import torch

from antiphon.bench import train as bench
from antiphon.bench.plain_loop import PlainLoop, copied_bytes
from antiphon.bench.train import TrainingCase, bench_train, check_losses, kept_for_backward
from antiphon.cli import main as cli
from antiphon.models.config import load_model_spec
from antiphon.specs.counts import count_parameters

KEYS = {"variant", "world_size", "tokens_per_s", "step_s_median", "exposed_comm_s", "comm_bytes", "activation_bytes"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "wait_for_quiet", lambda **options: True)
    monkeypatch.setattr(bench, "measure_gemm_flops_per_s", lambda dtype: 1e12)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["antiphon", "bench", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_rows(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    sizes = ("--batch", 2, "--sequence-length", 16, "--rounds", 2, "--dtype", "float32,bfloat16")
    assert run(monkeypatch, checkpoint, *sizes, "--json", out) == 0
    found = json.loads(out.read_text())
    assert found["bench"] == "train"
    rows = found["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "float32", "bfloat16", "bfloat16"]
    assert rows[0]["variant"] == "antiphon"
    assert rows[1]["variant"].startswith("transformers ")
    for row in rows:
        assert row.keys() >= KEYS
        assert row["world_size"] == 1
        assert row["comm_bytes"] == 0
        assert row["activation_bytes"] > 0
        assert row["steps"] == 2
        assert row["tokens_per_s"] == pytest.approx(32 / row["step_s_median"])
    assert 0.02 < rows[0]["activation_bytes"] / rows[1]["activation_bytes"] < 2.0
    assert rows[1]["ratio_to_loop"] == 1.0


@pytest.mark.slow
def test_two_ranks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside `DistributedDataParallel`, with equal losses; both send something, and say how long they wait for it."""
    out = tmp_path / "out.json"
    sizes = ("--batch", 2, "--sequence-length", 16, "--rounds", 1, "--ranks", 2, "--threads", 2)
    assert run(monkeypatch, checkpoint, *sizes, "--set", "parallel.sequence=2", "--json", out) == 0
    ours, loop = json.loads(out.read_text())["rows"]
    for row in (ours, loop):
        assert row.keys() >= KEYS
        assert row["world_size"] == 2
        assert row["threads"] == 1
        assert row["comm_bytes"] > 0
        assert row["fraction_of_gemm_peak"] > 0
    spec = load_model_spec(checkpoint)
    assert loop["comm_bytes"] == 4 * count_parameters(spec).total, "an all-reduce of all gradients"


@pytest.mark.slow
def test_a_compiled_loop_is_timed_too(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    sizes = ("--batch", 2, "--sequence-length", 16, "--rounds", 1, "--threads", 1)
    assert run(monkeypatch, checkpoint, *sizes, "--compiled", "--json", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows][2] == "transformers grouped_mm + torch.compile"
    assert rows[2]["step_s_median"] > 0
    assert rows[2]["ratio_to_loop"] > 0
    assert [row["activation_bytes"] is None for row in rows] == [False, False, True]


def test_other_losses_are_not_timed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_losses("float32", 0, 2.0, 2.0001)
    step = PlainLoop.step
    monkeypatch.setattr(PlainLoop, "step", lambda self, batch, rate: step(self, batch, rate) * 1.001)
    case = TrainingCase(folder=checkpoint, batch=2, sequence_length=16, dtype="float32", max_rounds=1)
    with pytest.raises(AssertionError, match=r"step 0, float32: the trainer's loss is .* nothing is timed"):
        bench_train([case], lambda text: None, lambda done, total: None)


def test_kept_bytes_count_each_tensor_once_and_no_parameter() -> None:
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True) * 1
    with kept_for_backward() as kept:
        y = x @ weight.t()  # keeps x, and a view of the parameter
        torch.sin(y).sum()  # keeps y
        torch.cos(y).sum()  # keeps y, which is counted already
    assert sum(kept.values()) == 2 * 4 * 8 * 4


def test_what_batched_mm_would_copy(checkpoint: Path) -> None:
    spec = load_model_spec(checkpoint)
    one = copied_bytes(spec, 1)
    assert one == spec.router.top_k * 3 * spec.hidden_size * spec.feed_forward.intermediate * 4
    assert copied_bytes(spec, 10) == 10 * one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 0", "--batch is 0: it must be 1 to 65536"),
        ("--dtype float16", "--dtype 'float16': 'float16' is not measured, use float32 or bfloat16"),
        ("--ranks 3", "--batch is 8, which 3 ranks cannot share"),
        ("--ranks 2 --compiled", "--compiled: it is timed on one process, --ranks is 2"),
        ("--ladder msm --compiled", "--threads, --ranks, --set, --compiled or several dtypes: a ladder says what runs"),
        ("--ranks 1,x", "--ranks '1,x' is not a list of numbers"),
        ("--ranks 2 --set steps=3", "--set steps=3: only keys of parallel can be set here"),
        ("--sequence-length 100000", "--sequence-length is 100000, the model's positions end at"),
    ],
)
def test_what_is_refused(
    options: str, message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, checkpoint, *options.split()) == 2
    assert message in capsys.readouterr().err
