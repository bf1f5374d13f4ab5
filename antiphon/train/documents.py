"""Documents of text, JSON lines and Parquet files, in a fixed order."""

import glob
import json
from collections.abc import Iterator
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


def read_documents(file: Path, text_key: str) -> Iterator[str]:
    """The documents of one file; empty ones are passed over."""
    if file.suffix == ".jsonl":
        texts = _json_lines(file, text_key)
    elif file.suffix == ".parquet":
        texts = _parquet(file, text_key)
    else:
        texts = iter([_text(file)])
    return (text for text in texts if text)


def _text(file: Path) -> str:
    data = file.read_bytes()
    if b"\0" in data:
        raise UserError(f"{file}: holds zero bytes, so it is not text: exclude it (data.exclude)")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start}"
        raise UserError(f"{file}: not UTF-8 text ({place}): convert or exclude it") from error


def _json_lines(file: Path, text_key: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}: line {number} is not JSON ({error}): correct or exclude it") from error
            yield _field(record, text_key, f"{file}: line {number}")


def _field(record: Any, text_key: str, where: str) -> str:
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: no text under {text_key!r} (there is: {keys}): set data.text_key")
    return text


def _parquet(file: Path, text_key: str) -> Iterator[str]:
    try:
        from pyarrow import parquet  # an optional dependency
    except ImportError as error:
        raise UserError(f"{file}: reading Parquet needs pyarrow: pip install pyarrow") from error
    table = parquet.ParquetFile(file)
    if text_key not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise UserError(f"{file}: no column {text_key!r} (there is: {names}): set data.text_key")
    for batch in table.iter_batches(columns=[text_key]):
        yield from (str(value) for value in batch.column(0).to_pylist() if value is not None)
