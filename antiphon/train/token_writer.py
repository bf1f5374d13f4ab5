"""The files of token ids while they are written: one split's, and how far both are, so a kill loses little.

`progress.json` tells what is on disk for good. Started again, a writer cuts its files to that length and goes on."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.train.encoder import EncodedDocument

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenSize:
    """The size of one source's part of a split so far. `text_bytes`: of the text that the ids stand for. `digest`: of
    the ids, document by document."""

    num_ids: int = 0
    num_documents: int = 0
    text_bytes: int = 0
    digest: str = ""


Sizes = dict[str, TokenSize]  # by source, in order


@dataclass(frozen=True)
class Reached:
    """How far tokenizing is: it goes on from `place` of file `file` of all sources' files. `first`: by split, how much
    there was when the first block was full; of a folder that is written in blocks."""

    made_from: str = ""
    file: int = 0
    place: int = 0
    train: Sizes = field(default_factory=dict)
    held_out: Sizes = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(file: Path, made_from: str | None) -> "Reached":
        """What an earlier try left; the beginning if it left nothing, or was of something else. None: of anything."""
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            train, held_out = (
                {name: TokenSize(**each) for name, each in entries.pop(split).items()} for split in SPLITS
            )
            reached = Reached(**entries, train=train, held_out=held_out)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return Reached()
        return reached if made_from in (None, reached.made_from) else Reached()


class TokenWriter:
    """One split being written, from `sizes` on: what is behind it in the files is cut off."""

    def __init__(self, cache: Path, split: Split, dtype: np.dtype[Any], sizes: Sizes, *, learned: bool) -> None:
        self.sizes = dict(sizes)
        self._dtype = dtype
        num_ids = sum(each.num_ids for each in sizes.values())
        self._ids = _open_at(cache / f"{split}.bin", num_ids * dtype.itemsize)
        self._starts = _open_at(cache / f"{split}.starts", sum(each.num_documents for each in sizes.values()) * 8)
        self._learned = _open_at(cache / f"{split}.learned", num_ids) if learned else None
        self._num_ids = num_ids

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._ids, self._starts, self._learned) if file is not None]

    def add(self, source: str, encoded: EncodedDocument) -> None:
        self._starts.write(np.int64(self._num_ids).tobytes())
        ids = np.asarray(encoded.ids, dtype=self._dtype).tobytes()
        self._ids.write(ids)
        learned = b"" if self._learned is None else np.asarray(encoded.learned, dtype=np.uint8).tobytes()
        if self._learned is not None:
            self._learned.write(learned)
        self._num_ids += len(encoded.ids)
        old = self.sizes.get(source, TokenSize())
        digest = hashlib.blake2b(old.digest.encode() + ids + learned, digest_size=16).hexdigest()
        self.sizes[source] = TokenSize(
            old.num_ids + len(encoded.ids), old.num_documents + 1, old.text_bytes + encoded.num_bytes, digest
        )

    def num_blocks(self, block_tokens: int) -> int:
        """Full ones, with an id behind them; 0: there are no blocks."""
        return max(0, self._num_ids - 1) // block_tokens if block_tokens else 0

    def to_disk(self) -> None:
        for file in self._files():
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


def write_whole(file: Path, entries: dict[str, Any]) -> None:
    """Replace `file`; a kill leaves the old one or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=1) + "\n")
    partial.replace(file)
