"""Training steps on a GPU give the losses of the CPU, in float32, with the kernels and without them."""

from pathlib import Path

import pytest
import torch

from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def curve(folder: Path, device: str) -> list[float]:
    folder.mkdir()
    Trainer(prepare(config_of(folder, "steps=8", "output.checkpoint_every=0", f"device={device}"))).run()
    return [loss for _, loss in losses(folder)]


@pytest.mark.parametrize("kernels", ["triton", "PyTorch"])
def test_losses_are_those_of_the_cpu(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "PyTorch":
        monkeypatch.setenv("ANTIPHON_TRITON", "0")
    expected = curve(tmp_path / "cpu", "cpu")
    assert curve(tmp_path / "gpu", "cuda") == pytest.approx(expected, rel=2e-3)
