"""The demo model's loss: of checkpoints on text that none was trained on, and beside a plain loop over transformers.

    python benchmarks/demo_loss.py held-out examples/demo-moe [OTHER_CHECKPOINT ...]
    python benchmarks/demo_loss.py curves --steps 200

`held-out` takes the files of the standard library that `examples/demo-moe/train.toml` names as never trained on, in
windows of its sequence length that begin without context.

`curves` trains the same model twice, step by step in turns: with `antiphon.train` and `antiphon.bench.plain_loop`.
Same first weights (transformers' own), batches in the same order, rates, AdamW and clipping. What the plain loop does
not have is off on both sides: balance and z-loss, weight decay, documents that do not see each other.
"""

import argparse
import sysconfig
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.bench.plain_loop import PlainLoop
from antiphon.bench.train import EnoughError, samples_of
from antiphon.train.config import read_config
from antiphon.train.encoder import load_tokenizer
from antiphon.train.setup import prepare
from antiphon.train.trainer import TrainedStep, Trainer

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "demo-moe"
LIBRARY = Path(sysconfig.get_path("stdlib"))
HELD_OUT = (
    "chunk.py",
    "concurrent/futures/process.py",
    "copyreg.py",
    "email/__init__.py",
    "lib2to3/fixer_base.py",
    "lib2to3/fixes/fix_nonzero.py",
    "lib2to3/pgen2/parse.py",
    "multiprocessing/connection.py",
    "sched.py",
    "tkinter/constants.py",
    "zoneinfo/__init__.py",
)
BATCH = 16


@torch.no_grad()
def held_out(folder: Path) -> tuple[float, float]:
    """(nats a token, nats a byte) of the checkpoint in `folder`."""
    length = read_config(FOLDER / "train.toml").sequence_length
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    texts = [(LIBRARY / name).read_text() for name in HELD_OUT if (LIBRARY / name).is_file()]
    ids = [id for text in texts for id in (*tokenizer.encode(text, add_special_tokens=False).ids, 0)]
    windows = torch.tensor(ids[: (len(ids) - 1) // length * length + 1]).unfold(0, length + 1, length)
    losses = [
        F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
        for rows in windows.split(BATCH)
    ]
    per_token = sum(losses) / (len(windows) * length)
    return per_token, per_token * len(ids) / sum(len(text.encode()) for text in texts)


def first_weights(folder: Path) -> None:
    """A model that transformers has drawn, with the demo's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)
    model.save_pretrained(folder)
    copy(FOLDER / "tokenizer.json", folder)


def curves(num_steps: int, every: int) -> None:
    with TemporaryDirectory(prefix="antiphon-demo-loss-") as name:
        workplace = Path(name)
        first_weights(workplace / "first")
        changes = [f"model.path={workplace}/first", "model.begin=checkpoint", f"output.folder={workplace}/out"]
        changes += [f"steps={num_steps}", "output.evaluate_every=0", "data.document_masks=false"]
        changes += ["loss.balance=0.0", "loss.z=0.0", "optimizer.weight_decay=0.0", "optimizer.name=adamw"]
        config = read_config(FOLDER / "train.toml", changes)
        optimizer = config.optimizer
        loop = PlainLoop(workplace / "first", torch.float32, optimizer.betas, optimizer.eps, optimizer.clip)
        loop.use_experts("grouped_mm")
        furthest = 0.0
        print("| step | antiphon train | plain loop |\n|---|---|---|")

        def on_step(result: TrainedStep) -> None:
            nonlocal furthest
            numbers = range(result.step * config.batch, (result.step + 1) * config.batch)
            theirs = loop.step(samples_of(config).batch(numbers, torch.device("cpu")), result.rate)
            furthest = max(furthest, abs(theirs - result.loss))
            if result.step % every == 0 or result.step == num_steps - 1:
                print(f"| {result.step} | {result.loss:.4f} | {theirs:.4f} |", flush=True)
            if result.step == num_steps - 1:
                raise EnoughError

        try:
            Trainer(prepare(config), on_step).run()
        except EnoughError:
            print(f"\nfurthest apart: {furthest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo model's loss.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_checkpoints = commands.add_parser("held-out", help="nats a byte of checkpoints on text never trained on")
    of_checkpoints.add_argument("folders", nargs="+", type=Path)
    beside_loop = commands.add_parser("curves", help="the loss of both loops, from the same first weights")
    beside_loop.add_argument("--steps", type=int, default=200)
    beside_loop.add_argument("--every", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.command == "curves":
        curves(arguments.steps, arguments.every)
        return
    for folder in arguments.folders:
        per_token, per_byte = held_out(folder)
        print(f"{folder}: {per_token:.4f} nats a token, {per_byte:.4f} nats a byte")


if __name__ == "__main__":
    main()
