"""Token ids on disk: written once from the documents, read as a memory map.

A cache folder holds `train.bin` and `held_out.bin` (ids one after the other, each document behind its end mark),
`train.starts.npy` and `held_out.starts.npy` (where documents begin), and `meta.json`, written last: what the ids were
made from. A folder without it, or made from something else, is written anew.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.specs.model import ModelSpec
from antiphon.train.config import DataConfig
from antiphon.train.documents import find_files, read_documents

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
_BATCH_TEXTS = 64
_VERSION = 1


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split, and where its documents begin. `num_text_bytes`: of the text that the ids stand for."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    num_text_bytes: int


def load_tokenizer(path: Path) -> Tokenizer:
    """From a folder with a `tokenizer.json`, or that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own type is Exception
        raise UserError(f"{file}: no tokenizer can be read ({error}): set data.tokenizer") from error


def tokenize(config: DataConfig, tokenizer_path: Path, spec: ModelSpec, cache: Path, seed: int) -> None:
    """Write `cache` unless it holds these documents' ids already. Shows progress; may take long.

    A document is held out by its number and `seed`. `UserError` if there is no text, or the tokenizer is not the
    model's."""
    files = find_files(config)
    made_from = _made_from(config, files, tokenizer_path, seed)
    if _read_meta(cache).get("made_from") == made_from:
        return
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.get_vocab_size() > spec.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {spec.vocab_size}: "
            "they do not belong together, set data.tokenizer"
        )
    if not spec.eos_token_ids:
        raise UserError("config.json: eos_token_id is missing: it marks the end of a document")
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "meta.json").unlink(missing_ok=True)
    writers = {split: _Writer(cache, split, spec.vocab_size) for split in SPLITS}
    with progress("tokenizing") as report:
        _write_all(config, files, tokenizer, spec.eos_token_ids[0], seed, writers, report)
    sizes = {split: writer.close() for split, writer in writers.items()}
    if not sizes["train"]["ids"]:
        raise UserError(f"{len(files)} files hold no text to train on: check data.files")
    meta = {"version": _VERSION, "made_from": made_from, "splits": sizes}
    (cache / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def open_tokens(cache: Path, split: Split) -> TokenFile:
    """A memory map of what `tokenize` wrote."""
    meta = _read_meta(cache)["splits"][split]
    ids: np.ndarray[Any, Any] = np.zeros(0, dtype=meta["dtype"])
    if meta["ids"]:
        ids = np.memmap(cache / f"{split}.bin", dtype=meta["dtype"], mode="r")
    if ids.shape[0] != meta["ids"]:
        raise UserError(f"{cache}: {split}.bin holds {ids.shape[0]} ids, not {meta['ids']}: remove the folder")
    return TokenFile(ids, np.load(cache / f"{split}.starts.npy"), meta["text_bytes"])


class _Writer:
    """One split being written."""

    def __init__(self, cache: Path, split: Split, vocab_size: int) -> None:
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._starts_file = cache / f"{split}.starts.npy"
        (cache / f"{split}.bin").unlink(missing_ok=True)  # a run that has mapped the old ids keeps them
        self._file = (cache / f"{split}.bin").open("wb")
        self._starts: list[int] = []
        self._num_ids = 0
        self._text_bytes = 0

    def add(self, ids: list[int], num_bytes: int) -> None:
        self._starts.append(self._num_ids)
        self._file.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self._num_ids += len(ids)
        self._text_bytes += num_bytes

    def close(self) -> dict[str, Any]:
        self._file.close()
        np.save(self._starts_file, np.asarray(self._starts, dtype=np.int64))
        return {"ids": self._num_ids, "text_bytes": self._text_bytes, "dtype": np.dtype(self._dtype).name}


def _write_all(
    config: DataConfig,
    files: list[Path],
    tokenizer: Tokenizer,
    end_id: int,
    seed: int,
    writers: dict[Split, _Writer],
    report: Callable[[float, float | None], None],
) -> None:
    number, texts = 0, list[str]()

    def flush() -> None:
        nonlocal number
        for text, encoding in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            split: Split = "held_out" if _is_held_out(number, seed, config.held_out) else "train"
            writers[split].add([*encoding.ids, end_id], len(text.encode()))
            number += 1
        texts.clear()

    for done, file in enumerate(files, start=1):
        for text in read_documents(file, config.text_key):
            texts.append(text)
            if len(texts) == _BATCH_TEXTS:
                flush()
        report(done, len(files))
    flush()


def _is_held_out(number: int, seed: int, part: float) -> bool:
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < part * 2**64


def _made_from(config: DataConfig, files: list[Path], tokenizer_path: Path, seed: int) -> str:
    """A digest of everything that the ids depend on; files by name, size and time."""
    digest = hashlib.blake2b(digest_size=16)
    parts: list[object] = [_VERSION, config.text_key, config.held_out, seed]
    file = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    for path in (file, *files):
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): give another file") from error
        parts.append((str(path), status.st_size, status.st_mtime_ns))
    digest.update(repr(parts).encode())
    return digest.hexdigest()


def _read_meta(cache: Path) -> dict[str, Any]:
    try:
        meta = json.loads((cache / "meta.json").read_text())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) and meta.get("version") == _VERSION else {}
