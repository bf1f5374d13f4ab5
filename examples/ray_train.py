"""Trains on a Ray cluster: python examples/ray_train.py FILE.toml --ranks 4 [--gpus] [--set KEY=VALUE]

Ray places the ranks, connects them, and starts them anew when one dies; the run goes on from its newest checkpoint.
All nodes need the same output.folder. Needs `pip install "ray[train]"`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from antiphon.train.config import read_config
from antiphon.train.device import backends_of
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer


def rank(settings: dict[str, Any]) -> None:
    """One rank. Ray has set RANK and its like, and joined the process group."""
    config = read_config(Path(settings["file"]), settings["changes"])
    facts = Trainer(prepare(config)).run()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"steps {facts['steps']}, loss {facts['loss']}, {facts['checkpoint']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("file", type=Path, help="what to train: a TOML file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--storage", default="/tmp/antiphon-ray", help="where Ray keeps its own notes")
    chosen = parser.parse_args()
    backends = backends_of(torch.device("cuda" if chosen.gpus else "cpu"))
    TorchTrainer(
        rank,
        train_loop_config={"file": str(chosen.file.resolve()), "changes": chosen.changes},
        torch_config=TorchConfig(backend=backends),
        scaling_config=ScalingConfig(num_workers=chosen.ranks, use_gpu=chosen.gpus),
        run_config=RunConfig(storage_path=chosen.storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
