"""The training benchmark: the trainer's step beside a plain loop over transformers, on one process or several ranks.

1. a text of random words is tokenized; both begin with the checkpoint's weights and see the same batches
2. the first steps' losses must agree; what both keep for backward is counted meanwhile
3. then they take turns, step by step, until each has three steps that other processes did not disturb

Balance, z-loss and weight decay are off on both sides. Several ranks are started by `torchrun` (`main`);
there the loop has a copy of the model on each of them and a share of the batch. Rejected: one after the other. The
machine drifts within a minute.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from antiphon.base.errors import ResourceError
from antiphon.base.programs import python_module
from antiphon.base.progress import Report, progress
from antiphon.bench.limits import measure_gemm_flops_per_s
from antiphon.bench.step_case import TEXT
from antiphon.bench.train_turns import NUM_COMPARED, Comparison, Say, TrainingCase, write_text
from antiphon.cost.training.counts import training_flops_per_token
from antiphon.models.config import load_model_spec


def bench_train(cases: Sequence[TrainingCase], say: Say, report: Report) -> list[dict[str, Any]]:
    """Rows of both contestants for each case."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        case.check_sizes(load_model_spec(case.folder))
        dtype = getattr(torch, case.dtype)
        peak = measure_gemm_flops_per_s(dtype)
        with TemporaryDirectory(prefix="antiphon-bench-train-") as name:
            write_text(Path(name) / TEXT, case.tokens_per_step * (NUM_COMPARED + case.max_rounds + 1))
            if case.ranks > 1:
                found = run_ranks(case, Path(name))
            else:
                comparison = Comparison(case, say, report)
                comparison.run(Path(name))
                found = rows_of(case, comparison)
        peak = max(peak, measure_gemm_flops_per_s(dtype))
        for row in found:
            flops_per_s = training_flops_per_token(load_model_spec(case.folder), case.sequence_length)
            flops_per_s *= row["tokens_per_s"]
            rows.append(row | {"gemm_peak_flops_per_s": peak, "fraction_of_gemm_peak": flops_per_s / peak})
    return rows


def run_ranks(case: TrainingCase, workplace: Path) -> list[dict[str, Any]]:
    """The rows of a case on several ranks, which `torchrun` starts; they end together, whatever fails."""
    file, rows = case.write(workplace), workplace / "rows.json"
    command = python_module("torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}")
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)}
    ended = subprocess.run([*command, "-m", "antiphon.bench.train", str(file)], env=environment, check=False)
    if ended.returncode:
        raise ResourceError(f"a rank of {case.ranks} failed: what it said stands above")
    found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


def rows_of(case: TrainingCase, comparison: Comparison) -> list[dict[str, Any]]:
    """SI units. One process exchanges nothing, so its communication is 0."""
    names = ("antiphon", f"transformers {comparison.implementation}")
    loop_s = comparison.theirs.counted.median(float)
    rows = []
    for name, timed in zip(names, (comparison.ours, comparison.theirs), strict=True):
        step_s = timed.counted.median(float)
        rows.append(
            {
                "variant": name,
                "world_size": case.ranks,
                "dtype": case.dtype,
                "batch": case.batch,
                "sequence_length": case.sequence_length,
                "tokens_per_s": case.tokens_per_step / step_s,
                "step_s_median": step_s,
                "exposed_comm_s": statistics.median(timed.waited_s) if case.ranks > 1 else 0.0,
                "comm_bytes": timed.sent_bytes,
                "activation_bytes": timed.kept_bytes,
                "ratio_to_loop": loop_s / step_s,
                "threads": case.threads,
                "steps": len(timed.counted.counted),
                "foreign_cpu_share": timed.counted.foreign_share,
            }
        )
    return rows


def main(file: Path) -> None:
    """One rank of a case, which `torchrun` starts. The first one writes the rows."""
    case = TrainingCase.read(file)
    if int(os.environ["RANK"]):
        Comparison(case, lambda text: None, lambda done, total: None).run(file.parent)
        return
    with progress(f"timing training steps on {case.ranks} ranks") as report:
        comparison = Comparison(case, lambda text: print(text, file=sys.stderr), report)
        comparison.run(file.parent)
    (file.parent / "rows.json").write_text(json.dumps(rows_of(case, comparison)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
