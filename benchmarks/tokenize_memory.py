"""Tokenize much text and say how much memory that took: what `data.stream_tokens` promises, tried with gigabytes.

python benchmarks/tokenize_memory.py out/tokenize --gigabytes 10 [--minutes 9]

1. JSON lines of generated text are written into the folder, 256 MiB a file, and a tokenizer that has a token for each
   of their words, because it is fast; what is there stays.
2. `antiphon train --tokenize` runs on them. Behind `--minutes` it is killed; the same command goes on.
3. Said are bytes, tokens, seconds and the peak of resident memory over all pieces. Exit code 1: the peak is above
   `--most-mib`, or ids are missing.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

MODEL = Path(__file__).parents[1] / "examples" / "demo-moe"
FILE_BYTES = 256 << 20
DOCUMENT_PARTS = 40
POOL = 4000  # paragraphs that documents are put together from
WORDS = 4000  # fewer than the model has tokens


def write_texts(folder: Path, num_bytes: int) -> list[Path]:
    """Files of records, together `num_bytes` at least, and their tokenizer."""
    drawn = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = ["".join(drawn.choices(syllables, k=drawn.randint(1, 4))) for _ in range(WORDS)]
    tokens = {word: number for number, word in enumerate(["<unknown>", ".", *sorted(set(words))])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(str(folder / "tokenizer.json"))
    pool = [" ".join(drawn.choices(words, k=200)) + " ." for _ in range(POOL)]
    files = []
    for number in range(-(-num_bytes // FILE_BYTES)):
        file = folder / f"text-{number:04}.jsonl"
        files.append(file)
        if file.exists():
            continue
        partial, drawn = file.with_suffix(".partial"), random.Random(number + 1)
        with partial.open("w", encoding="utf-8") as lines:
            while lines.tell() < min(FILE_BYTES, num_bytes - number * FILE_BYTES):
                lines.writelines(
                    json.dumps({"text": " ".join(drawn.choices(pool, k=DOCUMENT_PARTS))}) + "\n" for _ in range(32)
                )
        partial.replace(file)
    return files


def tokenize(folder: Path, block_tokens: int, limit_s: float) -> tuple[bool, float, int]:
    """(whether it ended, seconds, peak of resident bytes) of one piece."""
    run = folder / "run.toml"
    run.write_text(
        f'steps = 1\nsequence_length = 256\nbatch = 1\n[model]\npath = "{MODEL}"\n[data]\nfiles = ["text-*.jsonl"]\n'
        f'tokenizer = "tokenizer.json"\nstream_tokens = {block_tokens}\n[output]\nfolder = "out"\n',
        encoding="utf-8",
    )
    began_s = time.monotonic()
    command = [sys.executable, "-m", "antiphon.cli.main", "train", str(run), "--tokenize"]
    process = subprocess.Popen(command)
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() - began_s > limit_s:
            process.kill()
        time.sleep(0.1)
    return process.returncode == 0, time.monotonic() - began_s, usage.ru_maxrss * 1024


def written(folder: Path) -> tuple[int, int]:
    """(tokens, documents) on disk."""
    cache = folder / "out" / "tokens" / "stream" / "00"
    for name in ("meta.json", "progress.json"):
        if (cache / name).exists():
            found = json.loads((cache / name).read_text(encoding="utf-8"))
            splits = found.get("splits", found)
            sizes = [size for split in ("train", "held_out") for size in splits[split].values()]
            return sum(each["num_ids"] for each in sizes), sum(each["num_documents"] for each in sizes)
    return 0, 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="kill it behind these; the same goes on")
    parser.add_argument("--block-tokens", type=int, default=20_000_000)
    parser.add_argument("--most-mib", type=float, default=1024.0)
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    files = write_texts(chosen.folder, int(chosen.gigabytes * 1e9))
    is_whole, seconds, peak = tokenize(chosen.folder, chosen.block_tokens, chosen.minutes * 60)
    pieces = chosen.folder / "pieces.jsonl"
    with pieces.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"seconds": round(seconds, 1), "peak_bytes": peak, "whole": is_whole}) + "\n")
    all_pieces = [json.loads(line) for line in pieces.read_text(encoding="utf-8").splitlines()]
    peak = max(each["peak_bytes"] for each in all_pieces)
    num_ids, num_documents = written(chosen.folder)
    text_bytes = sum(file.stat().st_size for file in files)
    print(
        f"{'all' if is_whole else 'a part'} of {text_bytes / 1e9:.2f} GB: {num_ids:,} tokens of {num_documents:,} "
        f"documents, {len(all_pieces)} pieces, {sum(each['seconds'] for each in all_pieces):.0f} s, "
        f"peak {peak / 2**20:.0f} MiB"
    )
    if not is_whole:
        print("the same command goes on")
    return 0 if is_whole and peak <= chosen.most_mib * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())
