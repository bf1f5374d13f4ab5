"""Documents of text, JSON lines and Parquet files, in a fixed order."""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.train.config import DataConfig


def find_files(config: DataConfig) -> list[Path]:
    """The files that the patterns name, sorted, each once; `UserError` if a pattern names none."""
    found: set[str] = set()
    for pattern in config.files:
        matches = [name for name in _names(pattern) if Path(name).is_file()]
        if not matches:
            raise UserError(f"data.files: {pattern} names no file: check the path")
        found.update(matches)
    excluded = {name for pattern in config.exclude for name in _names(pattern)}
    if not found - excluded:
        raise UserError(f"data.exclude leaves none of {len(found)} files: remove a pattern")
    return [Path(name) for name in sorted(found - excluded)]


def _names(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207  # absolute patterns: Path.glob refuses them


@dataclass(frozen=True)
class Document:
    """`next_place`: where `read_documents` goes on behind it. `share`: of the file that is read by then."""

    text: str
    next_place: int
    share: float


def read_documents(file: Path, text_key: str, begin: int = 0) -> Iterator[Document]:
    """The documents of one file from place `begin` on; empty ones are passed over. `UserError` if it cannot be read."""
    if file.suffix == ".jsonl":
        documents = _json_lines(file, text_key, begin)
    elif file.suffix == ".parquet":
        documents = _parquet(file, text_key, begin)
    else:
        documents = iter([Document(_decode(file, _read(file), 0), 1, 1.0)] if not begin else [])
    return (document for document in documents if document.text)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}): exclude it (data.exclude)") from error


def _decode(file: Path, data: bytes, first_byte: int) -> str:
    """`data` begins at `first_byte` of the file."""
    zero = data.find(b"\0")
    if zero >= 0:
        raise UserError(
            f"{file}: holds a zero byte at byte {first_byte + zero:,}, so it is not text: exclude it (data.exclude)"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {first_byte + error.start:,}"
        raise UserError(f"{file}: not UTF-8 text ({place}): convert or exclude it") from error


def _json_lines(file: Path, text_key: str, begin: int) -> Iterator[Document]:
    """Places are bytes of the file."""
    size = max(1, file.stat().st_size)
    with file.open("rb") as lines:
        lines.seek(begin)
        place = begin
        for line in lines:
            first_byte, place = place, place + len(line)
            if not line.strip():
                continue
            text = _decode(file, line, first_byte)
            try:
                record = json.loads(text)
            except ValueError as error:
                number = _line_number(file, first_byte)
                raise UserError(f"{file}: line {number:,} is not JSON ({error}): correct or exclude it") from error
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                raise UserError(_no_text(record, text_key, f"{file}: line {_line_number(file, first_byte):,}"))
            yield Document(record[text_key], place, place / size)


def _line_number(file: Path, first_byte: int) -> int:
    """The number of the line that begins at `first_byte`; the first is 1."""
    number = 1
    with file.open("rb") as lines:
        for line in lines:
            first_byte -= len(line)
            if first_byte < 0:
                break
            number += 1
    return number


def _no_text(record: Any, text_key: str, where: str) -> str:
    keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    return f"{where}: no text under {text_key!r} (there is: {keys}): set data.text_key"


def _parquet(file: Path, text_key: str, begin: int) -> Iterator[Document]:
    """Places are rows of the table."""
    try:
        import pyarrow  # an optional dependency
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{file}: reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(file)
        if text_key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(f"{file}: no column {text_key!r} (there is: {names}): set data.text_key")
        place, num_rows = 0, max(1, table.metadata.num_rows)
        for group in range(table.num_row_groups):
            group_end = place + table.metadata.row_group(group).num_rows
            if group_end <= begin:
                place = group_end
                continue
            for batch in table.iter_batches(row_groups=[group], columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    place += 1
                    if place > begin and value is not None:
                        yield Document(str(value), place, place / num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file}: not a Parquet file that can be read ({reason}): exclude it (data.exclude)") from error
