"""Rebuild the demo model: train tokenizer and model on the standard library, then write a checkpoint here.

    python examples/demo-moe/train.py --minutes 60

Method:
  1. corpus.py reads the running interpreter's standard library, tokenizer.py learns its vocabulary;
  2. the text is packed into a memory-mapped stream of token ids, cut into windows of `seq_len`;
  3. one process per CPU core trains on its part of every batch, and the processes average their gradients;
  4. rates rise over the first steps and fall linearly to zero at the deadline;
  5. every few minutes checkpoint.py writes the whole folder transformers loads, file by file and atomically.

The schedule follows the clock, not a step count, so that a busy machine merely sees fewer tokens. Processes,
not threads: products this small lose most of a second thread to its synchronisation. Seeds are fixed, but the
clock makes two runs differ.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from checkpoint import export_checkpoint
from corpus import Corpus, load_corpus, pack, pack_held_out, top_level_starts
from model import TrainableMoe, model_config
from optimizer import build_optimizers
from tokenizer import train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, distributed

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what comes out, but for the clock."""

    minutes: float
    num_processes: int = 1
    vocab_size: int = 4096
    seq_len: int = 256
    batch_sequences: int = 16
    num_warmup_steps: int = 60
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    balance_weight: float = 0.02
    chat_fraction: float = 0.03
    num_packed_passes: int = 6
    export_every_s: float = 180.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes is {self.minutes}; it must be positive: pass --minutes 60, say")
        if self.num_processes < 1 or self.batch_sequences % self.num_processes:
            raise ValueError(
                f"{self.num_processes} processes cannot share batches of {self.batch_sequences} sequences "
                "evenly: pass a divisor of it as --processes"
            )


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out token ids and the number of bytes of text they stand for."""

    ids: np.ndarray
    num_bytes: int


def windows(
    ids: np.ndarray,
    top_level: np.ndarray,
    recipe: Recipe,
    rank: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each [batch_sequences / num_processes, seq_len]: process `rank`'s share.

    Every pass over the stream has a new offset and order, the same in all processes. Every second window
    moves on to the next unindented line: prompts begin there, and no indentation is to be guessed at.
    """
    rng = np.random.default_rng(recipe.seed)
    while True:
        starts = np.arange(rng.integers(recipe.seq_len), len(ids) - 2 * recipe.seq_len, recipe.seq_len)
        rng.shuffle(starts)
        starts[::2] += [int(top_level[start : start + recipe.seq_len].argmax()) for start in starts[::2]]
        for first in range(0, len(starts) - recipe.batch_sequences + 1, recipe.batch_sequences):
            share = starts[first : first + recipe.batch_sequences][rank :: recipe.num_processes]
            rows = np.stack([ids[start : start + recipe.seq_len + 1] for start in share])
            batch = torch.from_numpy(rows.astype(np.int64))
            yield batch[:, :-1], batch[:, 1:]


def prepare(recipe: Recipe, stream: Path) -> tuple[Tokenizer, Corpus]:
    """Learn the tokenizer and write the packed training text to `stream`."""
    corpus = load_corpus(chat_fraction=recipe.chat_fraction, seed=recipe.seed)
    tokenizer = train_tokenizer(corpus.train, vocab_size=recipe.vocab_size)
    num_ids = pack(tokenizer, corpus, stream, num_passes=recipe.num_packed_passes, seed=recipe.seed)
    num_ids //= recipe.num_packed_passes
    print(
        f"corpus: {len(corpus.train)} files, {corpus.train_bytes / 1e6:.2f} MB, "
        f"{len(corpus.chats)} chat samples; {num_ids / 1e6:.2f} M tokens a pass; "
        f"held out: {len(corpus.held_out)} files",
        flush=True,
    )
    return tokenizer, corpus


def held_out_loss_per_byte(model: TrainableMoe, held_out: HeldOut, recipe: Recipe) -> float:
    """Cross-entropy over the whole batches of held-out windows, in nats per byte.

    Every window starts without context. Gradients stay enabled: another mode, or a batch of another size,
    would compile the layers anew.
    """
    starts = range(0, len(held_out.ids) - recipe.seq_len, recipe.seq_len)
    windows_of_ids = [held_out.ids[start : start + recipe.seq_len + 1] for start in starts]
    rows = torch.from_numpy(np.stack(windows_of_ids).astype(np.int64))
    batch_size = recipe.batch_sequences // recipe.num_processes
    num_batches = len(rows) // batch_size
    batches = rows[: num_batches * batch_size].chunk(num_batches)
    losses = [model(batch[:, :-1], batch[:, 1:])[0].item() for batch in batches]
    return sum(losses) / num_batches * len(held_out.ids) / held_out.num_bytes


def average(parameters: Sequence[Tensor], *scalars: float) -> list[float]:
    """Replace gradients by their mean over all processes; waits for the others. Returns `scalars`' means."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients] + [torch.tensor(scalars)])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    means = flat.split([gradient.numel() for gradient in gradients] + [len(scalars)])
    for gradient, mean in zip(gradients, means, strict=False):
        gradient.copy_(mean.view_as(gradient))
    return means[-1].tolist()


class Trainer:
    """Model, optimizers and counters of one process; all processes hold equal ones."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, held_out: HeldOut) -> None:
        self.recipe, self.tokenizer, self.held_out = recipe, tokenizer, held_out
        self.config = model_config(vocab_size=recipe.vocab_size)
        self.model = TrainableMoe(self.config, seq_len=recipe.seq_len)
        self.parameters = list(self.model.parameters())
        self.optimizers = build_optimizers(self.model, muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr)
        self.peak_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.num_steps = 0
        self.mean_loss = math.log(recipe.vocab_size)
        self.elapsed_s = 0.0

    def set_rates(self) -> None:
        """Scale all learning rates by warm-up and by the share of the time that is left."""
        warmup = min((self.num_steps + 1) / self.recipe.num_warmup_steps, 1.0)
        rate = warmup * max(1.0 - self.elapsed_s / (self.recipe.minutes * 60), 0.0)
        for optimizer, peaks in zip(self.optimizers, self.peak_rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate

    def step(self, inputs: Tensor, targets: Tensor, start_s: float) -> Tensor:
        """One update; returns this process' assignments per layer and expert.

        The clock is averaged with the gradients, so that all processes agree on rates and on the last step.
        """
        self.set_rates()
        loss, balance, counts_LE = self.model(inputs, targets)
        (loss + self.recipe.balance_weight * balance).backward()
        elapsed_s = time.monotonic() - start_s
        mean_loss, self.elapsed_s = average(self.parameters, loss.item(), elapsed_s)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        decay = min(0.99, 1 - 1 / self.num_steps)
        self.mean_loss = decay * self.mean_loss + (1 - decay) * mean_loss
        return counts_LE

    def report(self, counts_LE: Tensor) -> None:
        """Print loss, speed, time left and how evenly the last step used the experts."""
        shares = counts_LE / counts_LE.sum(dim=1, keepdim=True)
        num_tokens = self.num_steps * self.recipe.seq_len * self.recipe.batch_sequences
        print(
            f"step {self.num_steps} loss {self.mean_loss:.4f} tokens {num_tokens / 1e6:.2f} M "
            f"{num_tokens / self.elapsed_s:.0f} tokens/s, "
            f"{self.recipe.minutes - self.elapsed_s / 60:.1f} min left, "
            f"expert share {shares.min():.3f} to {shares.max():.3f}",
            flush=True,
        )

    def export(self) -> None:
        """Write the checkpoint and report the held-out loss."""
        export_checkpoint(self.model, self.config, self.tokenizer, _FOLDER)
        per_byte = held_out_loss_per_byte(self.model, self.held_out, self.recipe)
        print(
            f"exported after {self.elapsed_s / 60:.1f} min; held-out loss {per_byte:.4f} nats/byte",
            flush=True,
        )

    def train(self, stream: Path, rank: int) -> None:
        """Train until the recipe's time is over; process 0 reports and exports on the way and at the end."""
        ids = np.memmap(stream, dtype=np.uint16, mode="r")
        batches = windows(ids, top_level_starts(self.tokenizer, ids), self.recipe, rank)
        start_s, last_export_s = time.monotonic(), 0.0
        while self.elapsed_s < self.recipe.minutes * 60:
            counts_LE = self.step(*next(batches), start_s)
            if rank == 0 and self.num_steps % 50 == 0:
                self.report(counts_LE)
            if rank == 0 and self.elapsed_s - last_export_s > self.recipe.export_every_s:
                self.export()
                last_export_s = self.elapsed_s
        if rank == 0:
            self.export()


def run_process(rank: int, recipe: Recipe, tokenizer: Tokenizer, held_out: HeldOut, stream: Path) -> None:
    """Train as process `rank` of `recipe.num_processes`, on one thread; meets the others beside `stream`."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{stream}.meeting", rank=rank, world_size=recipe.num_processes
    )
    trainer = Trainer(recipe, tokenizer, held_out)
    if rank == 0:
        num_parameters = sum(parameter.numel() for parameter in trainer.parameters)
        print(f"model: {num_parameters / 1e6:.2f} M parameters; the first step compiles", flush=True)
    trainer.model.compile_parts()
    trainer.train(stream, rank)
    distributed.destroy_process_group()


def main() -> None:
    """Parse the dials, prepare the text, train."""
    parser = argparse.ArgumentParser(description="Train the demo MoE model on Python's standard library.")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock minutes to train for")
    parser.add_argument("--processes", type=int, default=1, help="processes, one thread each (default 1)")
    arguments = parser.parse_args()
    recipe = Recipe(minutes=arguments.minutes, num_processes=arguments.processes)
    with tempfile.TemporaryDirectory() as scratch:
        stream = Path(scratch) / "train.bin"
        tokenizer, corpus = prepare(recipe, stream)
        ids, num_bytes = pack_held_out(tokenizer, corpus)
        held_out = HeldOut(ids=ids, num_bytes=num_bytes)
        torch.multiprocessing.spawn(
            run_process, args=(recipe, tokenizer, held_out, stream), nprocs=recipe.num_processes
        )


if __name__ == "__main__":
    main()
