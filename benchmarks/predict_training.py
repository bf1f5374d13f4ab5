"""Predicted against measured: what a profile says of a training step, beside steps that `antiphon train` took here.

    antiphon profile examples/demo-moe --phase train --ranks 1,2,4 --folder out/profile
    python benchmarks/predict_training.py examples/demo-moe out/profile/profile.json --rounds 3

Every form is a whole run of the command, with fresh processes, in turns for `--rounds` rounds; its figure is the median
of the rounds' medians. The first steps warm up and do not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from antiphon.bench.train import write_text
from antiphon.cost.profile import read_profile
from antiphon.models.config import load_model_spec
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.planned_run import StepPrediction, predict_step
from antiphon.train.ranks import sizes_of

STEPS, WARM = 10, 3
FORMS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (1, ("micro_batch=2",)),
    (2, ()),
    (2, ("parallel.zero=1",)),
    (2, ("parallel.sequence=2", "parallel.expert=2")),
    (2, ("parallel.sequence=2", "parallel.expert=2", "parallel.dispatch=gather_scatter")),
    (2, ("parallel.tensor=2", "parallel.expert_tensor=2", "parallel.dispatch=gather_scatter")),
    (2, ("parallel.pipeline=2", "micro_batch=2")),
    (4, ("parallel.sequence=2", "parallel.expert=2")),
    (4, ("parallel.sequence=4", "parallel.expert=4")),
    (4, ("parallel.pipeline=2", "parallel.sequence=2", "parallel.expert=2", "micro_batch=4")),
    (4, ("parallel.zero=2", "parallel.tensor=2", "parallel.expert=2")),
)


def write_run(workplace: Path, model: Path, batch: int, length: int) -> Path:
    """A run that never saves and logs every step."""
    write_text(workplace / "text.txt", batch * length * (STEPS + 1))
    file = workplace / "train.toml"
    file.write_text(
        f"""steps = {STEPS}
sequence_length = {length}
batch = {batch}
[model]
path = "{model.resolve()}"
[data]
files = ["text.txt"]
held_out = 0.0
cache = "tokens"
[output]
folder = "out"
log_every = 1
checkpoint_every = 0
"""
    )
    return file


def measured_s(file: Path, ranks: int, changes: tuple[str, ...]) -> float:
    """The median of the steps that count, of one run."""
    with TemporaryDirectory(prefix="antiphon-predict-training-") as folder:
        options = [option for change in (*changes, f"output.folder={folder}") for option in ("--set", change)]
        command = [sys.executable, "-m", "antiphon.cli.main", "train", str(file), *options, "--nproc", str(ranks)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=550)
        if ended.returncode:
            raise SystemExit(f"{' '.join(changes)} on {ranks} ranks failed:\n{ended.stderr}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_s"] for row in rows if "step_s" in row and row["step"] >= WARM)


def name_of(ranks: int, changes: tuple[str, ...]) -> str:
    return f"{ranks}: {' '.join(change.removeprefix('parallel.') for change in changes) or 'plain'}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted and measured training steps.")
    parser.add_argument("model", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    profile, spec = read_profile(arguments.profile), load_model_spec(arguments.model)
    with TemporaryDirectory(prefix="antiphon-predict-training-") as name:
        file = write_run(Path(name), arguments.model, arguments.batch, arguments.sequence_length)
        configs: list[TrainConfig] = [read_config(file, changes) for _, changes in FORMS]
        predicted: list[StepPrediction] = [
            predict_step(spec, config, sizes_of(config, spec, ranks), profile)
            for config, (ranks, _) in zip(configs, FORMS, strict=True)
        ]
        seconds: list[list[float]] = [[] for _ in FORMS]
        for number in range(arguments.rounds):
            for index, form in enumerate(FORMS):
                seconds[index].append(measured_s(file, *form))
                print(f"round {number + 1}, {name_of(*form)}: {seconds[index][-1]:.3f} s", file=sys.stderr)
    rows = []
    print("| ranks: form | predicted ms | measured ms | runs | error |\n|---|---|---|---|---|")
    for form, prediction, found in zip(FORMS, predicted, seconds, strict=True):
        step_s = statistics.median(found)
        error = prediction.step_s / step_s - 1
        runs = ", ".join(f"{each * 1e3:.0f}" for each in found)
        print(f"| {name_of(*form)} | {prediction.step_s * 1e3:.0f} | {step_s * 1e3:.0f} | {runs} | {error:+.0%} |")
        rows.append({"form": name_of(*form), "predicted_s": prediction.step_s, "measured_s": step_s, "runs_s": found})
        rows[-1]["parts_s"] = prediction.parts_s
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    print(f"\nmedian error {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
