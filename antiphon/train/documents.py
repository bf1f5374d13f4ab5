"""Documents of text, JSON, Parquet and Arrow files, in a fixed order, a block at a time.

A folder stands for the tables in it, as `datasets` writes and the Hub stores them. Text and JSON may be compressed.
What is read of a file at once is bounded: a line or a record, a batch of rows, or a block of a large text.

A `.json` file is one array of records, one record, or a record a line: its first character and first line say which.
Rejected: to read it as text where it is none of them. A wrong `data.text_key` would then train on braces.
"""

import codecs
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.units import format_bytes
from antiphon.train.config_tables import DataConfig, Kind, SourceConfig

MOST_TEXT_BYTES = 16 << 20  # of one document of a text file, and of one record of a `.json` file
_LINES, _JSON = (".jsonl", ".ndjson"), ".json"
_TABLES = (".parquet", ".arrow")
_COMPRESSED = (".gz", ".zst")
_READ_BYTES, _SPACE = 1 << 20, re.compile(r"[\s\ufeff]*")  # of an array
_KEYS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {  # needed, read where they are there
    "chat": (("messages",), ("tools",)),
    "answers": (("prompt", "answer"), ()),
}
_log = get_logger("train")


def find_files(config: DataConfig | SourceConfig, made_by: str = "") -> list[Path]:
    """The files that the patterns name, sorted, each once; `UserError` if a pattern names none. `made_by`: the command
    that makes what is missing."""
    found: set[str] = set()
    excluded: set[str] = set()
    for pattern in config.files:
        matches = [name for each in _names(pattern) for name in _files_of(Path(each))]
        if not matches and _is_folder(pattern):
            raise UserError(
                f"data.files: {pattern} is a folder without .parquet and .arrow files: name what is in it, as in "
                f"{pattern}/**/*.txt"
            )
        if not matches:
            fix = f"make it first: {made_by}" if made_by else "check the path"
            raise UserError(f"data.files: {pattern} names no file: {fix}")
        found.update(matches)
    for pattern in config.exclude:
        names = set(_names(pattern))
        folders = {Path(name) for name in names if _is_folder(name)}
        left_out = {name for name in found if name in names or not folders.isdisjoint(Path(name).parents)}
        if not left_out:
            _say_unused(pattern, len(found))
        excluded |= left_out
    left = [Path(name) for name in sorted(found - excluded)]
    if not left:
        raise UserError(f"data.exclude leaves none of {len(found)} files: remove a pattern")
    return left


@cache  # a run looks for its files several times
def _say_unused(pattern: str, num_files: int) -> None:
    _log.warning("data.exclude: %s matches none of the %d files of data.files: check it", pattern, num_files)


def _is_folder(pattern: str) -> bool:
    return os.path.isdir(pattern)  # noqa: PTH112  # of a name that is too long `Path` raises


def _names(pattern: str) -> list[str]:
    """What has this name, or matches it. A folder that is there is meant as it is named, brackets and all."""
    path = Path(pattern)
    if os.path.lexists(path):  # as above
        return [pattern]
    root = next(each for each in path.parents if _is_folder(str(each)))
    matches = glob.glob(str(path.relative_to(root)), root_dir=root, recursive=True)  # noqa: PTH207  # links too
    return [str(root / name) for name in matches]


def _files_of(path: Path) -> list[str]:
    """A file, or the tables in a folder."""
    if path.is_file():
        return [str(path)]
    return [str(each) for each in path.rglob("*") if _ending(each) in _TABLES and each.is_file()]


def _ending(file: Path) -> str:
    """What says how it is read."""
    return file.suffix.lower()


@dataclass(frozen=True)
class Document:
    """`text`, or a `record` with the keys of its kind. `next_place`: where `read_documents` goes on behind it. `share`:
    of the file that is read by then."""

    text: str
    next_place: int
    share: float
    record: dict[str, Any] | None = None


def read_documents(file: Path, text_key: str, begin: int = 0, kind: Kind = "text") -> Iterator[Document]:
    """The documents of one file from place `begin` on; empty ones are passed over. `UserError` if it cannot be read."""
    ending = _ending(file.with_suffix("") if _ending(file) in _COMPRESSED else file)
    is_json = ending == _JSON or ending in _LINES
    if kind != "text" and not is_json and _ending(file) not in _TABLES:
        raise UserError(
            f"{file}: data.kind is {kind!r}, which is read from .jsonl, .json, .parquet and .arrow: convert it"
        )
    if is_json:
        read = _json_lines if ending in _LINES else _json_reader(file)
        documents = read(file, text_key, begin, kind)
    elif _ending(file) in _TABLES:
        documents = _table(file, text_key, begin, kind)
    else:
        documents = _text(file, begin)
    return (document for document in documents if document.text or document.record)


@contextmanager
def _opened(file: Path, begin: int) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(bytes from place `begin` on, the file itself). `UserError` if it cannot be read."""
    try:
        with file.open("rb") as raw:
            if _ending(file) not in _COMPRESSED:
                raw.seek(begin)
                yield raw, raw
                return
            stream = _decompressed(file, raw)
            while begin > 0 and (skipped := len(stream.read(min(begin, 1 << 20)))):
                begin -= skipped
            yield stream, raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{file}: cannot be read ({reason}): exclude it (data.exclude)") from error


def _decompressed(file: Path, raw: BinaryIO) -> BinaryIO:
    if _ending(file) == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    try:
        import pyarrow  # an optional dependency
    except ImportError as error:
        raise UserError(f"{file}: reading .zst needs pyarrow: pip install 'antiphon[train]'") from error
    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))  # by lines, too


def _text(file: Path, begin: int) -> Iterator[Document]:
    """Places are bytes of the text. A larger file is several documents, cut at line ends."""
    size = max(1, file.stat().st_size)
    place = begin
    with _opened(file, begin) as (stream, raw):
        left = b""
        while block := left + stream.read(MOST_TEXT_BYTES - len(left)):
            whole = len(block) < MOST_TEXT_BYTES
            end = len(block) if whole else (block.rfind(b"\n") + 1 or _letter_end(block))
            if not whole and not place:
                _log.warning("%s is cut into documents of %s, at line ends", file, format_bytes(MOST_TEXT_BYTES))
            left = block[end:]
            text = _decode(file, block[:end], place)
            place += end
            yield Document(text, place, min(1.0, raw.tell() / size))


def _letter_end(block: bytes) -> int:
    """Where the last whole letter of UTF-8 ends."""
    end = len(block)
    while end > len(block) - 4 and block[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if block[end - 1] & 0xC0 == 0xC0 else end


def _decode(file: Path, data: bytes, first_byte: int) -> str:
    """`data` begins at `first_byte` of the text, maybe with a mark of byte order."""
    zero = data.find(b"\0")
    if zero >= 0:
        raise UserError(
            f"{file}: holds a zero byte at byte {first_byte + zero:,}, so it is not text: exclude it (data.exclude)"
        )
    try:
        return data.decode("utf-8" if first_byte else "utf-8-sig")
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {first_byte + error.start:,}"
        raise UserError(f"{file}: not UTF-8 text ({place}): convert or exclude it") from error


def _json_lines(file: Path, text_key: str, begin: int, kind: Kind) -> Iterator[Document]:
    """Places are bytes of the text."""
    size = max(1, file.stat().st_size)
    with _opened(file, begin) as (lines, raw):
        place = begin
        while line := lines.readline():
            first_byte, place = place, place + len(line)
            if not line.strip():
                continue
            text = _decode(file, line, first_byte)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                fix = "rename it to .json" if text.strip() == "[" else "correct or exclude it"
                raise UserError(f"{file}: {_line(file, first_byte)} is not JSON ({error}): {fix}") from error
            where = partial(_line, file, first_byte)
            yield _document(_of_json(file, record, text, text_key, kind, where), place, min(1.0, raw.tell() / size))


def _of_json(
    file: Path, record: Any, text: str, text_key: str, kind: Kind, where: Callable[[], str]
) -> "str | dict[str, Any]":
    """What a record has, which was read from `text`. `where`: its place in the file, for an error."""
    if "\\ud" in text.lower() and _has_half_letters(record):
        raise UserError(f"{file}: {where()} has half of a surrogate pair: correct or exclude it")
    if (found := _of_record(record, text_key, kind)) is None:
        message = _no_text(record, text_key, kind, f"{file}: {where()}")
        if _JSON not in file.suffixes and isinstance(record, list):
            message += ", or rename the file to .json where it holds one array"
        elif _JSON in file.suffixes and kind == "text":
            lists = (
                [key for key, value in record.items() if isinstance(value, list)] if isinstance(record, dict) else []
            )
            message += ", or rename the file to .txt to read it as it is"
            message += f"; of records under {lists[0]!r} write the list alone" if lists else ""
        raise UserError(message)
    return found


def _json_reader(file: Path) -> Callable[[Path, str, int, Kind], Iterator[Document]]:
    """What reads a `.json` file, by how it begins."""
    with _opened(file, 0) as (stream, _):
        first = b"\n"
        while first and not first.removeprefix(codecs.BOM_UTF8).strip():
            first = stream.readline(MOST_TEXT_BYTES)
    first = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if first.startswith(b"["):
        return _json_array
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return _json_object if first else _json_lines
    return _json_lines


def _json_object(file: Path, text_key: str, begin: int, kind: Kind) -> Iterator[Document]:
    """One record over several lines. Its place is the end of the file."""
    with _opened(file, 0) as (stream, _):
        data = stream.read(MOST_TEXT_BYTES + 1)
    if len(data) > MOST_TEXT_BYTES:
        most = format_bytes(MOST_TEXT_BYTES)
        raise UserError(f"{file}: one object of more than {most}: write records as an array, or one a line (.jsonl)")
    text = _decode(file, data, 0)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}): correct it, or rename it to .txt to read it as it is") from error
    found = _of_json(file, record, text, text_key, kind, lambda: "its one object")
    if not begin:
        yield _document(found, len(data), 1.0)


def _json_array(file: Path, text_key: str, begin: int, kind: Kind) -> Iterator[Document]:
    """Places are bytes of the text, behind a record."""
    size, decoder, letters = max(1, file.stat().st_size), json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, at, place = "", 0, begin  # what is left to read begins at `at` in `text`, and at `place` in the file

    def read_on() -> bool:
        """False at the end of the file."""
        nonlocal text, at
        data = stream.read(max(_READ_BYTES, len(text) - at))
        try:
            text, at = text[at:] + letters.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            place_of_error = f"{error.reason} at byte {place + len(text[at:].encode()) + error.start:,}"
            raise UserError(f"{file}: not UTF-8 text ({place_of_error}): convert or exclude it") from error
        return bool(data)

    def pass_over(end: int) -> None:
        nonlocal at, place
        place += len(text[at:end].encode())
        at = end

    def next_mark() -> str:
        """What comes behind white space; empty at the end of the file."""
        while True:
            spaces = _SPACE.match(text, at)
            assert spaces is not None, "none are spaces too"
            pass_over(spaces.end())
            if at < len(text) or not read_on():
                return text[at : at + 1]

    def wrong(what: object) -> UserError:
        return UserError(f"{file}: the array is not JSON at byte {place:,} ({what}): correct or exclude it")

    with _opened(file, begin) as (stream, raw):
        if is_first := not begin:
            next_mark()
            pass_over(at + 1)  # the bracket by which it was found to be an array
        while (mark := next_mark()) != "]":
            if not is_first:
                if mark != ",":
                    raise wrong(f"{mark!r} in the place of , or ]" if mark else "it ends without ]")
                pass_over(at + 1)
                next_mark()
            is_first = False
            while True:
                try:
                    record, end = decoder.raw_decode(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    if isinstance(error, RecursionError) or len(text) - at > MOST_TEXT_BYTES or not read_on():
                        raise wrong(error) from error
            found = _of_json(file, record, text[at:end], text_key, kind, lambda: f"the record at byte {place:,}")
            pass_over(end)
            yield _document(found, place, min(1.0, raw.tell() / size))
        pass_over(at + 1)
        if mark := next_mark():
            raise wrong(f"{mark!r} behind its end")


def _has_half_letters(record: Any) -> bool:
    """JSON can name one half of a letter of UTF-16, which no UTF-8 has."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _document(found: "str | dict[str, Any]", place: int, share: float) -> Document:
    if isinstance(found, str):
        return Document(found, place, share)
    return Document("", place, share, found)


def _of_record(record: Any, text_key: str, kind: Kind) -> "str | dict[str, Any] | None":
    """The text of a record, empty for a null, or its keys of that kind; None if it has none."""
    if not isinstance(record, dict):
        return None
    if kind == "text":
        text = record.get(text_key, 0)
        return "" if text is None else text if isinstance(text, str) else None
    needed, others = _KEYS[kind]
    if any(record.get(key) is None for key in needed):
        return None
    return {key: record[key] for key in (*needed, *others) if record.get(key) is not None}


def _line(file: Path, first_byte: int) -> str:
    """``line 7``, of the one that begins at `first_byte`; the first is 1."""
    number = 1
    with _opened(file, 0) as (lines, _):
        while line := lines.readline():
            first_byte -= len(line)
            if first_byte < 0:
                break
            number += 1
    return f"line {number:,}"


def _no_text(record: Any, text_key: str, kind: Kind, where: str) -> str:
    keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    if kind == "text" and isinstance(record, dict) and record.get(text_key) is not None:
        found = type(record[text_key]).__name__
        return f"{where}: {text_key!r} is {found} and no text: convert it, or set data.text_key"
    if kind == "text":
        return f"{where}: no text under {text_key!r} (there is: {keys}): set data.text_key"
    return f"{where}: no {' and '.join(_KEYS[kind][0])} (there is: {keys}): data.kind {kind!r} needs them"


def _table(file: Path, text_key: str, begin: int, kind: Kind) -> Iterator[Document]:
    """Places are rows of the table."""
    try:
        import pyarrow  # an optional dependency
    except ImportError as error:
        raise UserError(f"{file}: reading tables needs pyarrow: pip install 'antiphon[train]'") from error
    needed, others = ((text_key,), ()) if kind == "text" else _KEYS[kind]
    try:
        place, num_rows = 0, 1
        for place, num_rows, rows in _batches(file, needed, others, begin):
            for record in rows:
                place += 1
                found = _of_record(record, text_key, kind)
                if place <= begin:
                    continue
                if found is not None:
                    yield _document(found, place, min(1.0, place / max(1, num_rows)))
                elif kind == "text":
                    raise UserError(_no_text(record, text_key, kind, f"{file}: row {place:,}"))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        named = "a Parquet" if _ending(file) == ".parquet" else "an Arrow"
        raise UserError(f"{file}: not {named} file that can be read ({reason}): exclude it (data.exclude)") from error


def _batches(
    file: Path, needed: Sequence[str], others: Sequence[str], begin: int
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """(number of the first row, rows of the file, rows) of each batch that reaches beyond row `begin`. Of an Arrow
    stream the number of rows is not known: an estimate from what is read."""
    import pyarrow
    from pyarrow import parquet

    if _ending(file) == ".parquet":
        table = parquet.ParquetFile(file)
        columns, place = _columns(file, table.schema_arrow.names, needed, others), 0
        for group in range(table.num_row_groups):
            group_rows = table.metadata.row_group(group).num_rows
            if place + group_rows <= begin:
                place += group_rows
                continue
            for batch in table.iter_batches(row_groups=[group], columns=columns):
                yield place, table.metadata.num_rows, batch.to_pylist()
                place += batch.num_rows
        return
    size, place = max(1, file.stat().st_size), 0
    with pyarrow.memory_map(str(file)) as mapped:
        with file.open("rb") as begun:
            is_file = begun.read(6) == b"ARROW1"  # with a directory at its end; `datasets` writes streams
        stream = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
        columns = _columns(file, stream.schema.names, needed, others)
        for batch in map(stream.get_batch, range(stream.num_record_batches)) if is_file else stream:
            share = max(1e-9, mapped.tell() / size)
            if place + batch.num_rows > begin:
                yield place, round((place + batch.num_rows) / share), batch.select(columns).to_pylist()
            place += batch.num_rows


def _columns(file: Path, names: Sequence[str], needed: Sequence[str], others: Sequence[str]) -> list[str]:
    if missing := [name for name in needed if name not in names]:
        fix = "set data.text_key" if len(needed) == 1 and not others else f"data.kind needs {' and '.join(needed)}"
        raise UserError(f"{file}: no column {missing[0]!r} (there is: {', '.join(names)}): {fix}")
    return [*needed, *(name for name in others if name in names)]
