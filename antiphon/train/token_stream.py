"""Token ids of a large text, written beside the steps: who writes, where, and how far it is.

1. Each source has a folder of its own, in which its ids grow (`train.tokens`). Files are taken in an order from the
   seed. The sources take turns, block by block; a source's block is its share of `data.stream_tokens`.
2. The first block is written before the first step. A process beside the first rank writes the rest, behind all other
   work of the machine (`nice`). It ends with that rank, however that ends, and the next run goes on where it was.
3. Ranks read in `progress.json` what is on disk for good, and wait for a block that is not. How fast ids are written
   so never decides what is in them.

The held-out text is that of the first block, so it is the same throughout the run; documents behind it that are held
out are not trained on either. Rejected: a thread beside the steps. Each of their small operators would wait for the
interpreter while the thread holds it.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.progress import Report, progress
from antiphon.base.system import one_writer, python_module, replace_text
from antiphon.base.units import format_bytes
from antiphon.models.config import load_model_spec
from antiphon.specs.checked import read
from antiphon.train.config_tables import DataConfig, SourceConfig
from antiphon.train.documents import find_files
from antiphon.train.encoder import ids_dtype
from antiphon.train.token_file import SourceTokens, TokenFile, joined, mapped
from antiphon.train.tokens import (
    IN_USE,
    NOTHING,
    WRITER_S,
    TokenSize,
    Written,
    digest_of_text,
    open_evaluation,
    tokenize,
    tokenizing,
    written_of,
)

ROUND = 4096  # samples: in each round of them a source has as many
_log = get_logger("train")
_FAILED = "failed.json"


@dataclass(frozen=True)
class StreamedSource:
    """`per_round`: of `ROUND` samples, those of this source. `block_tokens`: a whole number of sequences."""

    source: SourceConfig
    folder: Path
    files: tuple[Path, ...]
    made_from: str
    per_round: int
    block_tokens: int


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The text of a run in blocks. `length`: of a sequence."""

    data: DataConfig
    tokenizer: Path
    model: Path
    cache: Path
    seed: int
    length: int

    @property
    def folder(self) -> Path:
        return self.cache / "stream"

    @cached_property
    def sources(self) -> tuple[StreamedSource, ...]:
        """In the order of the configuration. Without weights a source's share is that of its files' bytes."""
        sources = self.data.all_sources()
        files = [find_files(each, self.data.made_by) for each in sources]
        sizes = [sum(file.stat().st_size for file in of) for of in files]
        weights = [
            max(1, size) if each.weight is None else each.weight for each, size in zip(sources, sizes, strict=True)
        ]
        found = []
        for place, (source, of, per_round) in enumerate(zip(sources, files, _parts(weights), strict=True)):
            order = np.random.default_rng((self.seed, place)).permutation(len(of))
            shuffled = tuple(of[number] for number in order)
            made_from = digest_of_text(self.data, (source,), shuffled, self.tokenizer, self.seed)
            tokens = self.data.stream_tokens * per_round / ROUND
            block = max(1, round(tokens / self.length)) * self.length
            folder = self.folder / f"{place:02}"
            found.append(StreamedSource(source, folder, shuffled, f"{made_from}-{block}", per_round, block))
        return tuple(found)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return ids_dtype(load_model_spec(self.model).vocab_size)

    def prepare(self) -> None:
        """Write the first block of each source and the evaluation sets, unless they are there."""
        spec = load_model_spec(self.model)
        with (
            one_writer(self.folder, IN_USE, WRITER_S),
            progress("tokenizing the first block", format_amount=format_bytes) as report,
        ):
            (self.folder / _FAILED).unlink(missing_ok=True)
            for each in self.sources:
                written = written_of(each.folder, each.made_from)
                if written is None or not written.has_block(0, each.block_tokens):
                    next(self._writing(each, report), None)
        if self.data.held_out and not any(self._first_held_out(number).num_ids for number in range(len(self.sources))):
            _log.warning(
                "the first block has no held-out document, so there is no held-out loss: raise data.stream_tokens (now "
                "%d) or data.held_out, or give an evaluation set",
                self.data.stream_tokens,
            )
        tokenize(self.data, self.tokenizer, spec, self.cache, self.seed, only_evaluation=True)

    def _first_held_out(self, number: int) -> TokenSize:
        """What of source `number` is held out in its first block."""
        return self.written(number).first.get("held_out", NOTHING)

    def write_all(self, report: Report = lambda done, total: None) -> None:
        """Write all that is not there yet, source by source in turns of a block. `report`: bytes of its files."""
        with one_writer(self.folder, IN_USE, WRITER_S):
            writing = [self._writing(each, report) for each in self.sources]
            while writing:
                writing = [each for each in writing if next(each, "whole") is None]

    def _writing(self, each: StreamedSource, report: Report) -> Iterator[None]:
        spec = load_model_spec(self.model)
        return tokenizing(
            *(self.data, (each.source,), (each.files,), each.made_from, self.tokenizer, spec, each.folder, self.seed),
            report,
            each.block_tokens,
        )

    @property
    def is_whole(self) -> bool:
        return all((found := written_of(each.folder)) is not None and found.is_whole for each in self.sources)

    def written(self, number: int) -> Written:
        """What is written of source `number`; to be called behind `prepare`."""
        found = written_of(self.sources[number].folder)
        if found is None:
            raise UserError(f"{self.sources[number].folder}: the token ids are gone: start again")
        return found

    def check_failed(self) -> None:
        """`UserError` once there will be no more."""
        try:
            failed = json.loads((self.folder / _FAILED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        raise UserError(str(failed["message"]))

    def say_failed(self, message: str) -> None:
        """To all ranks: there will be no more."""
        replace_text(self.folder / _FAILED, json.dumps({"message": message}))

    def block(self, number: int, block: int) -> TokenFile:
        """Block `block` of source `number`, which is there: of text, with the id behind it; of chats, those that begin
        in it."""
        source, written = self.sources[number], self.written(number)
        size, folder = source.block_tokens, source.folder
        first, end = block * size, min((block + 1) * size + 1, written.num_ids)
        starts = mapped(folder / "train.starts", np.dtype(np.int64), 0, written.num_documents)
        if source.source.is_chat:
            bounds = np.searchsorted(starts, (first, first + size))
            first, end = (int(starts[each]) if each < len(starts) else written.num_ids for each in bounds)
            own = starts[slice(*bounds)] - first
        else:
            own = starts[slice(*np.searchsorted(starts, (first, end)))] - first
            own = own if len(own) and own[0] == 0 else np.concatenate([[0], own])
        return self._file(source, "train", first, end, np.asarray(own))

    def held_out(self) -> TokenFile:
        """That of the first blocks, and the evaluation sets behind it."""
        parts = []
        for number, each in enumerate(self.sources):
            size = self._first_held_out(number)
            starts = mapped(each.folder / "held_out.starts", np.dtype(np.int64), 0, size.num_documents)
            parts.append(self._file(each, "held_out", 0, size.num_ids, starts))
        return joined([*parts, *open_evaluation(self.data, self.cache)])

    def _file(self, each: StreamedSource, split: str, first: int, end: int, starts: np.ndarray[Any, Any]) -> TokenFile:
        """Ids `first` to `end` of a source's split, in which documents begin at `starts`."""
        is_chat, count = each.source.is_chat, end - first
        learned = mapped(each.folder / f"{split}.learned", np.dtype(np.uint8), first, count) if is_chat else None
        return TokenFile(
            ids=mapped(each.folder / f"{split}.bin", self.dtype, first, count),
            starts=starts,
            learned=learned,
            sources=(SourceTokens(each.source.name, 0, count, is_chat),),
        )

    @property
    def digest(self) -> str:
        """A digest of the first blocks, and of the sizes of files and blocks: files may move, and not change."""
        parts = [
            (
                self.written(number).first.get("train", NOTHING).digest,
                [file.stat().st_size for file in each.files],
                each.block_tokens,
            )
            for number, each in enumerate(self.sources)
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def as_text(self) -> str:
        """For the process that writes."""
        made_from = [each.made_from for each in self.sources]
        return json.dumps({**asdict(self), "made_from": made_from}, default=str)


class StreamWriter:
    """The process that writes what is missing of `stream`, until `close`."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._process: subprocess.Popen[str] | None = None
        if not stream.is_whole:
            command = python_module("antiphon.train.token_stream")
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            assert self._process.stdin is not None
            self._process.stdin.write(stream.as_text() + "\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Tell all ranks if the process is gone and has said nothing."""
        code = None if self._process is None else self._process.poll()
        if code and not (self._stream.folder / _FAILED).exists():
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            message = f"tokenizing beside the steps ended {how}: the same command goes on"
            try:
                self._stream.say_failed(message)
            except OSError as error:  # of a full disk; the other ranks hear of it from this one
                raise UserError(message) from error

    def close(self) -> None:
        """End the process; what it wrote stays. May be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None


def _parts(weights: list[float]) -> list[int]:
    """Whole parts of `ROUND` in these proportions, each at least 1; the largest remainders are rounded up."""
    spare = ROUND - len(weights)
    exact = [spare * each / sum(weights) for each in weights]
    parts = [int(each) for each in exact]
    for place in sorted(range(len(weights)), key=lambda each: parts[each] - exact[each])[: spare - sum(parts)]:
        parts[place] += 1
    return [each + 1 for each in parts]


def _stream_of(text: str) -> TokenStream:
    """What `as_text` gave; `UserError` if files have changed since."""
    entries = json.loads(text)
    made_from = entries.pop("made_from")
    data = read(DataConfig, entries.pop("data"), "the run's data")
    entries |= {key: Path(entries[key]) for key in ("tokenizer", "model", "cache")}
    stream = TokenStream(data=data, **entries)
    if [each.made_from for each in stream.sources] != made_from:
        raise UserError("files of data.files changed while the run went on: start again")
    return stream


def main() -> int:
    """The process beside the first rank: its job comes as a line, and its end with the end of that pipe."""
    job = sys.stdin.readline()
    os.nice(10)

    def wait_for_the_end() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        _stream_of(job).write_all()
    except (UserError, OSError) as error:
        folder = Path(json.loads(job)["cache"]) / "stream"
        message = str(error)
        if isinstance(error, OSError):
            fix = "put it back" if isinstance(error, FileNotFoundError) else "make room"
            message = f"{error.filename or folder}: {error.strerror}: {fix}; the same command goes on"
        with suppress(OSError):  # then the first rank says that this process is gone
            replace_text(folder / _FAILED, json.dumps({"message": message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
