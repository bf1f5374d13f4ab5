"""Token ids on disk: written once from the documents, read as a memory map.

A cache folder holds `train.bin` and `held_out.bin` (ids one after the other, source by source, each document behind its
end mark), `train.starts` and `held_out.starts` (where documents begin, 8 bytes each), `train.learned` and
`held_out.learned` where chats are among them (a byte for each id: whether a loss is taken on it), and `meta.json`,
written last: what the ids were made from. A folder made from something else is written anew.

Until that is written, `progress.json` tells chunk by chunk how far the documents are read and how long the files are.
Started again, tokenizing cuts the files to that length and goes on. The files are the same, byte for byte, as if it had
never been stopped.
"""

import hashlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.progress import Report, progress
from antiphon.base.system import one_writer, replace_text
from antiphon.base.units import format_bytes
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import DataConfig, SourceConfig
from antiphon.train.documents import Document, find_files, read_documents
from antiphon.train.encoder import EncodedDocument, Encoder, load_tokenizer, template_files
from antiphon.train.token_file import SourceTokens, TokenFile, joined, mapped

_BATCH_TEXTS = 64
_BATCH_CHARACTERS = 4 << 20
_CHUNK_BYTES = 8 << 20  # of text: what a kill loses at most, with a batch
_VERSION = 5
_EVALUATION = "evaluation"  # in the cache
WRITER_S = 60.0  # for the writer of a run that has just ended
_log = get_logger("train")
IN_USE = "another run writes token ids there: stop it, or name another data.cache"


Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
_AS_WRITTEN = ConfigDict(extra="forbid")  # of what is read again: all of its fields, and no others


@dataclass(frozen=True)
class TokenSize:
    """The size of one source's part of a split so far. `text_bytes`: of the text that the ids stand for. `digest`: of
    the ids, document by document."""

    __pydantic_config__: ClassVar = _AS_WRITTEN
    num_ids: int
    num_documents: int
    text_bytes: int
    digest: str


NOTHING = TokenSize(0, 0, 0, "")
Sizes = dict[str, TokenSize]  # by source in order, or by split


@dataclass(frozen=True)
class Reached:
    """How far tokenizing is: it goes on from `place` of file `file` of all sources' files. `first`: by split, how much
    there was when the first block was full; of a folder that is written in blocks."""

    __pydantic_config__: ClassVar = _AS_WRITTEN
    made_from: str
    file: int
    place: int
    train: Sizes
    held_out: Sizes
    first: Sizes

    @staticmethod
    def read(file: Path, made_from: str | None) -> "Reached":
        """What an earlier try left; the beginning if it left nothing that has all fields
        and no others, or was of something else. None: of anything."""
        try:
            reached = _REACHED.validate_json(file.read_bytes())
        except (OSError, ValueError):
            return BEGINNING
        return reached if made_from in (None, reached.made_from) else BEGINNING


BEGINNING = Reached("", 0, 0, {}, {}, {})


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """`meta.json`. `sources`: whether each is of chats. `first`: as of `Reached`."""

    version: int
    made_from: str
    dtype: str
    sources: dict[str, bool]
    evaluation: tuple[str, ...] = ()
    splits: dict[Split, Sizes]
    first: Sizes

    @staticmethod
    def read(cache: Path) -> "_Meta | None":
        """None: there is none that this version can read."""
        try:
            meta = _META.validate_json((cache / "meta.json").read_bytes())
        except (OSError, ValueError):
            return None
        is_known = meta.dtype in ("uint16", "uint32") and set(meta.splits) == set(SPLITS)
        return meta if is_known and meta.version == _VERSION else None

    def changed_file(self, cache: Path) -> Path | None:
        """One that is not as long as it was written."""
        for split in SPLITS:
            num_ids, num_documents = _counts(self.splits[split])
            lengths = {"bin": num_ids * np.dtype(self.dtype).itemsize, "starts": num_documents * 8}
            lengths |= {"learned": num_ids} if any(self.sources.values()) else {}
            for ending, length in lengths.items():
                file = cache / f"{split}.{ending}"
                if not file.is_file() or file.stat().st_size != length:
                    return file
        return None


def _counts(sizes: Sizes) -> tuple[int, int]:
    """Ids, and documents."""
    return sum(each.num_ids for each in sizes.values()), sum(each.num_documents for each in sizes.values())


_REACHED, _META = TypeAdapter(Reached), TypeAdapter(_Meta)


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
        ids, is_learned, text_bytes = encoded
        self._starts.write(np.int64(self._num_ids).tobytes())
        id_bytes = np.asarray(ids, dtype=self._dtype).tobytes()
        self._ids.write(id_bytes)
        learned = b"" if self._learned is None else np.asarray(is_learned, dtype=np.uint8).tobytes()
        if self._learned is not None:
            self._learned.write(learned)
        self._num_ids += len(ids)
        old = self.sizes.get(source, NOTHING)
        digest = hashlib.blake2b(old.digest.encode() + id_bytes + learned, digest_size=16).hexdigest()
        self.sizes[source] = TokenSize(
            old.num_ids + len(ids), old.num_documents + 1, old.text_bytes + text_bytes, digest
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


def tokenize(
    config: DataConfig, tokenizer_path: Path, spec: ModelSpec, cache: Path, seed: int, *, only_evaluation: bool = False
) -> None:
    """Write `cache` unless it holds these documents' ids already. Shows progress; may take long. `seed`: of `pieces`.
    Evaluation sets have a folder of their own in it, so another set leaves the text's ids as they are.
    `only_evaluation`: the sources are left out.

    `UserError` if there is no text, or the tokenizer is not the model's."""
    parts = [] if only_evaluation else [(config.all_sources(), cache)]
    parts += [(config.evaluation, cache / _EVALUATION)] if config.evaluation else []
    for sources, folder in parts:
        files = [find_files(each, config.made_by) for each in sources]
        made_from = digest_of_text(config, sources, [file for of in files for file in of], tokenizer_path, seed)
        with one_writer(folder, IN_USE, WRITER_S), progress("tokenizing", format_amount=format_bytes) as report:
            for _ in tokenizing(config, sources, files, made_from, tokenizer_path, spec, folder, seed, report):
                pass


def tokenizing(
    config: DataConfig,
    sources: Sequence[SourceConfig],
    files: Sequence[Sequence[Path]],
    made_from: str,
    tokenizer_path: Path,
    spec: ModelSpec,
    cache: Path,
    seed: int,
    report: Report,
    block_tokens: int = 0,
) -> Iterator[None]:
    """Write the ids of `files` of `sources` into `cache`, unless they are there. With `block_tokens`, yields whenever
    one more block of training ids, and the id behind it, is on disk; it may be left there, and go on later."""
    meta = _Meta.read(cache)
    if meta is not None and meta.made_from == made_from:
        if not (changed := meta.changed_file(cache)):
            return
        _log.warning("%s is not as long as it was written: the token ids are made again", changed)
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
    encoder = Encoder(tokenizer, tokenizer_path, spec, config, seed)
    reached = yield from _write_ids(cache, encoder, sources, files, made_from, report, block_tokens)
    read = digest_of_text(config, sources, [file for of in files for file in of], tokenizer_path, seed)
    if read != made_from.partition("-")[0]:
        raise UserError("files of data.files changed while they were read: start again")
    evaluation = [each.name for each in config.evaluation if each in sources]
    for source, own in zip(sources, files, strict=True):
        if source.name in evaluation or source.name in reached.train:
            continue
        of = f"source {source.name!r}: " if config.sources else ""
        raise UserError(
            f"{of}all documents are held out: lower data.held_out (now {config.held_out}) or give more documents"
            if source.name in reached.held_out
            else f"{of}{len(own)} files hold no text to train on: check data.files"
        )
    if empty := [name for name in evaluation if name not in reached.held_out]:
        raise UserError(f"data.evaluation: {empty[0]!r} has no document: give it files with text, or leave it out")
    kinds = {each.name: each.is_chat for each in sources}
    written = _Meta(
        version=_VERSION,
        made_from=made_from,
        dtype=encoder.dtype.name,
        sources=kinds,
        evaluation=tuple(evaluation),
        splits={"train": reached.train, "held_out": reached.held_out},
        first=reached.first,
    )
    replace_text(cache / "meta.json", _META.dump_json(written, indent=1).decode() + "\n")
    (cache / "progress.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class Written:
    """What is on disk of a folder with one source, for good: a kill takes nothing of it away. `first`: the size of each
    split at the end of the first block."""

    num_ids: int
    num_documents: int
    is_whole: bool
    first: Sizes

    def has_block(self, number: int, block_tokens: int) -> bool:
        """Whether block `number` is there, or there will never be more of it."""
        return self.is_whole or self.num_ids > (number + 1) * block_tokens


def written_of(cache: Path, made_from: str = "") -> Written | None:
    """What `tokenizing` has written so far; None: nothing yet, or it is of something else than `made_from`."""
    meta = _Meta.read(cache)
    reached = Reached.read(cache / "progress.json", made_from or None)
    train, first = reached.train, reached.first
    if meta is not None and made_from in ("", meta.made_from):
        train, first = meta.splits["train"], meta.first
    elif not reached.made_from:
        return None
    size = next(iter(train.values()), NOTHING)
    return Written(size.num_ids, size.num_documents, meta is not None, first)


def open_held_out(config: DataConfig, cache: Path) -> TokenFile:
    """What is not trained on: the held-out split, and the evaluation sets behind it; with these, in memory."""
    found = open_tokens(cache, "held_out")
    return joined([found, *open_evaluation(config, cache)])


def open_evaluation(config: DataConfig, cache: Path) -> list[TokenFile]:
    """The ids of the evaluation sets, if there are any."""
    return [open_tokens(cache / _EVALUATION, "held_out")] if config.evaluation else []


def open_tokens(cache: Path, split: Split) -> TokenFile:
    """A memory map of what `tokenize` wrote of the sources."""
    meta = _Meta.read(cache)
    if meta is None:
        raise UserError(f"{cache}: the token ids are gone: start again")
    sizes = meta.splits[split]
    num_ids, num_documents = _counts(sizes)
    has_learned = any(meta.sources.values())
    sources, first = [], 0
    for name, size in sizes.items():
        is_evaluation = name in meta.evaluation
        sources.append(SourceTokens(name, first, first + size.num_ids, meta.sources[name], is_evaluation))
        first += size.num_ids
    digest = hashlib.blake2b("/".join(each.digest for each in sizes.values()).encode(), digest_size=16)
    return TokenFile(
        ids=mapped(cache / f"{split}.bin", np.dtype(meta.dtype), 0, num_ids),
        starts=mapped(cache / f"{split}.starts", np.dtype(np.int64), 0, num_documents),
        num_text_bytes=sum(each.text_bytes for each in sizes.values()),
        learned=mapped(cache / f"{split}.learned", np.dtype(np.uint8), 0, num_ids) if has_learned else None,
        sources=tuple(sources),
        digest=digest.hexdigest(),
    )


def _write_ids(
    cache: Path,
    encoder: Encoder,
    sources: Sequence[SourceConfig],
    files: Sequence[Sequence[Path]],
    made_from: str,
    report: Report,
    block_tokens: int,
) -> Generator[None, None, Reached]:
    """All ids, from where an earlier try ended; returns the sizes of the splits. Yields behind each block."""
    progress_file, learned = cache / "progress.json", any(each.is_chat for each in sources)
    reached = Reached.read(progress_file, made_from)
    kept_bytes, first = 0, reached.first
    with (
        TokenWriter(cache, "train", encoder.dtype, reached.train, learned=learned) as train,
        TokenWriter(cache, "held_out", encoder.dtype, reached.held_out, learned=learned) as held_out,
    ):
        for source, documents in _documents(sources, files, reached, report):
            while batch := _batch(documents, block_tokens or _BATCH_CHARACTERS):
                blocks = train.num_blocks(block_tokens)
                for is_out, encoded in encoder.encode([(each, path) for each, path, _ in batch], source):
                    (held_out if is_out else train).add(source.name, encoded)
                    kept_bytes += encoded[2]  # of its text
                    if not first and train.num_blocks(block_tokens):
                        first = _sizes_of(source, train, held_out)
                is_block = train.num_blocks(block_tokens) > blocks
                if kept_bytes >= _CHUNK_BYTES or is_block:
                    train.to_disk()
                    held_out.to_disk()
                    document, _, file = batch[-1]
                    kept = Reached(made_from, file, document.next_place, train.sizes, held_out.sizes, first)
                    replace_text(progress_file, json.dumps(asdict(kept), indent=1) + "\n")
                    kept_bytes = 0
                if is_block:
                    yield
            if block_tokens and not first:  # the text ends within the first block
                first = _sizes_of(source, train, held_out)
        return Reached(made_from, 0, 0, train.sizes, held_out.sizes, first)


def _sizes_of(source: SourceConfig, train: TokenWriter, held_out: TokenWriter) -> Sizes:
    parts = {"train": train.sizes, "held_out": held_out.sizes}
    return {split: of.get(source.name, NOTHING) for split, of in parts.items()}


Found = tuple[Document, Path, int]  # with its file, and the file's number among those of all sources


def _documents(
    sources: Sequence[SourceConfig],
    files: Sequence[Sequence[Path]],
    reached: Reached,
    report: Report,
) -> Iterator[tuple[SourceConfig, Iterator[Found]]]:
    """The documents of each source from `reached` on; reports bytes of the files."""
    sizes = [file.stat().st_size for of in files for file in of]
    total, first = sum(sizes), 0

    def of_source(source: SourceConfig, paths: Sequence[Path], first: int) -> Iterator[Found]:
        for index, path in enumerate(paths, first):
            if index < reached.file:
                continue
            done, begin = sum(sizes[:index]), reached.place if index == reached.file else 0
            for document in read_documents(path, source.text_key, begin, source.kind):
                yield document, path, index
                report(done + document.share * sizes[index], total)
            report(done + sizes[index], total)

    for source, paths in zip(sources, files, strict=True):
        yield source, of_source(source, paths, first)
        first += len(paths)


def _batch(documents: Iterator[Found], most_characters: int = _BATCH_CHARACTERS) -> list[Found]:
    """The next documents, as many as are encoded at once. `most_characters`: so that a small block ends in time."""
    batch: list[Found] = []
    length = 0
    for found in documents:
        batch.append(found)
        length += len(found[0].text)
        if len(batch) == _BATCH_TEXTS or length >= min(_BATCH_CHARACTERS, most_characters):
            break
    return batch


def digest_of_text(
    config: DataConfig, of: Sequence[SourceConfig], files: Sequence[Path], tokenizer_path: Path, seed: int
) -> str:
    """A digest of everything that the ids depend on; files by name, size and time."""
    digest = hashlib.blake2b(digest_size=16)
    sources = [replace(each, weight=None, epochs=None) for each in of]
    parts: list[object] = [_VERSION, sources, config.held_out, config.pieces, seed if config.pieces else 0]
    file = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
    templates = template_files(file.parent) if any(each.is_chat for each in sources) else []
    for path in (file, *templates, *files):
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}): give another file") from error
        parts.append((str(path), status.st_size, status.st_mtime_ns))
    digest.update(repr(parts).encode())
    return digest.hexdigest()
