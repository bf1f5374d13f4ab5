"""Token ids on disk: written once from the documents, read as a memory map.

A cache folder holds `train.bin` and `held_out.bin` (ids one after the other, each document behind its end mark),
`train.starts` and `held_out.starts` (where documents begin, 8 bytes each), and `meta.json`, written last: what the ids
were made from. A folder made from something else is written anew.

Until then `progress.json` tells, chunk by chunk, how far the documents are read and how long the files are: started
again, tokenizing cuts the files to that length and goes on. The files are the same, byte for byte, as if it had never
been stopped.
"""

import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from tokenizers import Tokenizer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.specs.model import ModelSpec
from antiphon.train.config import DataConfig
from antiphon.train.documents import find_files, read_documents

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
_BATCH_TEXTS = 64
_BATCH_CHARACTERS = 4 << 20
_CHUNK_BYTES = 8 << 20  # of text: what a kill loses at most, with a batch
_VERSION = 2


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split, and where its documents begin. `num_text_bytes`: of the text that the ids stand for."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    num_text_bytes: int


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder with a `tokenizer.json`, or in that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # the library's own types are Exception and a panic, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
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
    progress_file = cache / "progress.json"
    reached = _Reached.read(progress_file, made_from)
    dtype = np.dtype(np.uint16 if spec.vocab_size <= 1 << 16 else np.uint32)
    with (
        progress("tokenizing", format_amount=format_bytes) as report,
        _Writer(cache, "train", dtype, reached.train) as train,
        _Writer(cache, "held_out", dtype, reached.held_out) as held_out,
    ):
        writers: dict[Split, _Writer] = {"train": train, "held_out": held_out}

        def keep(reached: _Reached) -> None:
            for writer in writers.values():
                writer.to_disk()
            whole = replace(reached, made_from=made_from, train=train.size, held_out=held_out.size)
            _write_whole(progress_file, asdict(whole))

        documents = _documents(config, files, reached, report)
        _write_all(documents, tokenizer, spec.eos_token_ids[0], seed, config, writers, reached, keep)
    if not train.size.num_ids:
        raise UserError(
            f"{len(files)} files hold no text to train on: check data.files"
            if not held_out.size.num_ids
            else f"all documents are held out: lower data.held_out (now {config.held_out}) or give more documents"
        )
    splits = {split: {**asdict(writer.size), "dtype": dtype.name} for split, writer in writers.items()}
    _write_whole(cache / "meta.json", {"version": _VERSION, "made_from": made_from, "splits": splits})
    progress_file.unlink(missing_ok=True)


def open_tokens(cache: Path, split: Split) -> TokenFile:
    """A memory map of what `tokenize` wrote."""
    meta = _read_meta(cache)["splits"][split]
    ids: np.ndarray[Any, Any] = np.zeros(0, dtype=meta["dtype"])
    if meta["num_ids"]:
        ids = np.memmap(cache / f"{split}.bin", dtype=meta["dtype"], mode="r")
    if ids.shape[0] != meta["num_ids"]:
        raise UserError(f"{cache}: {split}.bin holds {ids.shape[0]} ids, not {meta['num_ids']}: remove the folder")
    return TokenFile(ids, np.fromfile(cache / f"{split}.starts", dtype=np.int64), meta["text_bytes"])


@dataclass(frozen=True)
class _Size:
    """The size of one split so far. `text_bytes`: of the text that the ids stand for."""

    num_ids: int = 0
    num_documents: int = 0
    text_bytes: int = 0


@dataclass(frozen=True)
class _Reached:
    """How far tokenizing is: document `num_documents` comes next, from `place` of file `file` on."""

    made_from: str = ""
    file: int = 0
    place: int = 0
    num_documents: int = 0
    train: _Size = _Size()
    held_out: _Size = _Size()

    @staticmethod
    def read(file: Path, made_from: str) -> "_Reached":
        """What an earlier try left; the beginning if it left nothing, or was of something else."""
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            train, held_out = (_Size(**entries.pop(split)) for split in SPLITS)
            reached = _Reached(**entries, train=train, held_out=held_out)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return _Reached()
        return reached if reached.made_from == made_from else _Reached()


class _Writer:
    """One split being written, from `size` on: what is behind it in the files is cut off."""

    def __init__(self, cache: Path, split: Split, dtype: np.dtype[Any], size: _Size) -> None:
        self.size = size
        self._dtype = dtype
        self._ids = _open_at(cache / f"{split}.bin", size.num_ids * dtype.itemsize)
        self._starts = _open_at(cache / f"{split}.starts", size.num_documents * 8)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._ids.close()
        self._starts.close()

    def add(self, ids: list[int], num_bytes: int) -> None:
        self._starts.write(np.int64(self.size.num_ids).tobytes())
        self._ids.write(np.asarray(ids, dtype=self._dtype).tobytes())
        old = self.size
        self.size = _Size(old.num_ids + len(ids), old.num_documents + 1, old.text_bytes + num_bytes)

    def to_disk(self) -> None:
        for file in (self._ids, self._starts):
            file.flush()
            os.fsync(file.fileno())


def _open_at(file: Path, num_bytes: int) -> BinaryIO:
    """`file`, cut to `num_bytes`, to be appended to. `UserError` if it is shorter: then somebody changed it."""
    if num_bytes and (not file.exists() or file.stat().st_size < num_bytes):
        raise UserError(f"{file}: shorter than {num_bytes} bytes, which were written: remove {file.parent}")
    if not num_bytes:
        file.unlink(missing_ok=True)  # a run that has mapped the old ids keeps them
    opened = file.open("ab")
    opened.truncate(num_bytes)
    return opened


def _documents(
    config: DataConfig, files: list[Path], reached: _Reached, report: Callable[[float, float | None], None]
) -> Iterator[tuple[str, int, int]]:
    """(text, file, where to go on in it) of each document from `reached` on; reports bytes of the files."""
    sizes = [file.stat().st_size for file in files]
    total, done = sum(sizes), sum(sizes[: reached.file])
    for index in range(reached.file, len(files)):
        begin = reached.place if index == reached.file else 0
        for document in read_documents(files[index], config.text_key, begin):
            yield document.text, index, document.next_place
            report(done + document.share * sizes[index], total)
        done += sizes[index]
        report(done, total)


def _write_all(
    documents: Iterator[tuple[str, int, int]],
    tokenizer: Tokenizer,
    end_id: int,
    seed: int,
    config: DataConfig,
    writers: dict[Split, _Writer],
    reached: _Reached,
    keep: Callable[[_Reached], None],
) -> None:
    """All of `documents`; `keep` sees every chunk."""
    number, kept_bytes = reached.num_documents, 0
    while batch := _batch(documents):
        kept_out = [_is_held_out(number + index, seed, config.held_out) for index in range(len(batch))]
        pieces = [
            [text] if out or not config.pieces else _pieces(text, config.pieces, f"{seed}/{number + index}")
            for index, ((text, _, _), out) in enumerate(zip(batch, kept_out, strict=True))
        ]
        encodings = iter(tokenizer.encode_batch([each for of in pieces for each in of], add_special_tokens=False))
        for (text, _, _), of_document, out in zip(batch, pieces, kept_out, strict=True):
            ids = [token for encoding in itertools.islice(encodings, len(of_document)) for token in encoding.ids]
            num_bytes = len(text.encode())
            writers["held_out" if out else "train"].add([*ids, end_id], num_bytes)
            number, kept_bytes = number + 1, kept_bytes + num_bytes
        if kept_bytes >= _CHUNK_BYTES:
            _, file, place = batch[-1]
            keep(_Reached(file=file, place=place, num_documents=number))
            kept_bytes = 0


def _pieces(text: str, mean_length: int, key: str) -> list[str]:
    """`text`, cut at random places that `key` decides, but never between two blanks: a person does not stop typing
    inside an indentation."""
    chance, pieces, start = random.Random(key), [], 0
    while start < len(text):
        end = start + 1 + int(chance.expovariate(1 / mean_length))
        while end < len(text) and text[end - 1 : end + 1] == "  ":
            end += 1
        pieces.append(text[start:end])
        start = end
    return pieces


def _batch(documents: Iterator[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The next documents, as many as are encoded at once."""
    batch: list[tuple[str, int, int]] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(document[0])
        if len(batch) == _BATCH_TEXTS or length >= _BATCH_CHARACTERS:
            break
    return batch


def _is_held_out(number: int, seed: int, part: float) -> bool:
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < part * 2**64


def _made_from(config: DataConfig, files: list[Path], tokenizer_path: Path, seed: int) -> str:
    """A digest of everything that the ids depend on; files by name, size and time."""
    digest = hashlib.blake2b(digest_size=16)
    parts: list[object] = [_VERSION, config.text_key, config.held_out, config.pieces, seed]
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


def _write_whole(file: Path, entries: dict[str, Any]) -> None:
    """Replace `file`; a kill leaves the old one or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=1) + "\n")
    partial.replace(file)
