"""Runs that others start: Slurm with torchrun, and Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.train import checkpoint
from tests.train.harness import losses, write_run

EXAMPLES = Path(__file__).parents[2] / "examples"
SLURM = {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "2"}


def slurm(folder: Path, srun: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The example, where `srun` is this script and Slurm gave one node."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name, text in (("srun", srun), ("scontrol", "echo localhost; echo other")):
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(EXAMPLES / "slurm_train.sh"), *map(str, arguments)]
    environment = os.environ | SLURM | {"PATH": path, "RANKS_PER_NODE": "2", "MASTER_PORT": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_what_slurm_starts_on_each_node(tmp_path: Path) -> None:
    done = slurm(tmp_path, 'echo "$OMP_NUM_THREADS $@"', "run.toml", "steps=3", "parallel.expert=2")
    assert done.returncode == 0, done.stderr
    expected = (
        "1 torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 3 --rdzv-id 17 --rdzv-backend c10d --rdzv-endpoint "
        "localhost:0 -m antiphon.cli.main train run.toml --set steps=3 --set parallel.expert=2"
    )
    assert done.stdout.strip() == expected
    refused = slurm(tmp_path / "no", "true")
    assert refused.returncode != 0
    assert "name the TOML file of the run" in refused.stderr


@pytest.mark.slow
def test_a_run_under_slurm(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    done = slurm(tmp_path, 'exec "$@"', file, "steps=3", "parallel.expert=2")
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path)) == 3


@pytest.mark.slow
def test_a_run_under_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed: make ray-check")
    file = write_run(tmp_path)
    command = [sys.executable, EXAMPLES / "ray_train.py", file, "--ranks", "2", "--set", "parallel.expert=2"]
    done = subprocess.run(
        [*command, "--storage", tmp_path / "ray"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path)) == 6
    assert checkpoint.find_checkpoints(tmp_path / "out/checkpoints")[-1].name == "step-00000006"
