"""Where numbers are shown beside `metrics.jsonl`."""

import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.train.run_folder import Metrics
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of


class Service:
    """What is asked of the package `wandb`."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.ended = 0

    def init(self, **settings: Any) -> Any:
        self.begun.append(settings)
        return SimpleNamespace(define_metric=lambda *_, **__: None, log=self.logged.append, finish=self._finish)

    def Histogram(self, values: Any) -> tuple[str, Any]:
        return "histogram", values

    def _finish(self) -> None:
        self.ended += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)  # type: ignore[arg-type]
    return made


def test_weights_and_biases_gets_the_same_numbers(tmp_path: Path, service: Service) -> None:
    Trainer(prepare(config_of(tmp_path, "steps=3", "output.wandb=moe"))).run()
    (begun,) = service.begun
    assert begun["project"] == "moe"
    assert begun["resume"] == "allow"
    assert begun["config"]["num_experts"] == 5
    losses = [line["1 learning/loss"] for line in service.logged if "1 learning/loss" in line]
    assert len(losses) == 3
    assert all("step" in line for line in service.logged)
    kinds = [line.get("3 experts/expert_rows/layer_00") for line in service.logged]
    assert any(isinstance(kind, tuple) and kind[0] == "histogram" for kind in kinds)
    assert service.ended == 1
    Trainer(prepare(config_of(tmp_path, "steps=4", "output.wandb=moe"))).run()
    assert service.begun[1]["id"] == begun["id"], "a run that goes on is the same run there"


def test_a_service_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    def no_key(**_: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(service, "init", no_key)
    with pytest.raises(UserError, match=r"output.wandb: api_key not configured \(no-tty\): log in .*MODE=offline"):
        Metrics(tmp_path, 0, "moe")
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = config_of(tmp_path / "run", "output.wandb=moe")
    for begin in (lambda: Metrics(tmp_path, 0, "moe"), lambda: prepare(config)):
        with pytest.raises(UserError, match=r"output\.wandb is 'moe' and the package is missing: pip install wandb"):
            begin()
    assert not (tmp_path / "run/out/tokens").exists(), "it is said before anything is done"
    monkeypatch.undo()
    Metrics(tmp_path, 0).close()


def test_numbers_by_rank_are_named_so(tmp_path: Path, service: Service) -> None:
    metrics = Metrics(tmp_path, 0, "moe")
    metrics.write(0, {"rank_busy_s": [1.0, 2.0], "fullest_expert_ratio": [1.5]})
    metrics.close()
    names = [name for line in service.logged for name in line if name != "step"]
    assert [name.rpartition("/")[2] for name in names] == ["rank_00", "rank_01", "layer_00"]


def test_curves_that_cannot_be_written_are_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And no traceback of TensorBoard's own thread."""
    pytest.importorskip("tensorboard")
    metrics = Metrics(tmp_path, 0)
    (tmp_path / "tensorboard").rename(tmp_path / "away")
    (tmp_path / "tensorboard").touch()
    for step in range(3):
        metrics.write(step, {"loss": 1.0})
        for _, close in metrics._boards:
            with suppress(OSError):
                close()
    assert "a board of curves failed" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    metrics.close()
