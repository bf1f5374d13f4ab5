"""Reads a checkpoint's tokenizer in a process with limits on time and memory, before anything else looks at it.

A `tokenizer.json` is a program of patterns and tables: one that compiles without an end, wants all memory, or ends the
library that reads it must cost a command one line of error. What has been read within the limits is then built once
more where ids become text, which takes as long and as much memory again, and never less or more. Only that process
and those of `text_service` encode: patterns run on a text may take any time, whatever building them took.
"""

import array
import math
from pathlib import Path
from types import TracebackType

from antiphon.base.errors import CheckpointError, UserError
from antiphon.serve.text.text_messages import Configure, Encode, ReadTokenizer, TokenIds, TokenizerSource
from antiphon.serve.text.text_queue import READ_PROGRAM, TextLimits, TextQueue, TextRequest
from antiphon.serve.text.text_service import expect
from antiphon.serve.text.tokenizer import TextTokenizer

_READ_TIMEOUT_S = 60.0
_READ_MEMORY_BYTES = 4 * 1024**3
_CONVERT_MEMORY_BYTES = 32 * 1024**3  # libraries that convert other files, torch among them, are mapped, too


class TokenizerReader:
    """A limited process that reads the tokenizer of the checkpoint in `folder`, and then encodes texts with it; for a
    `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        memory_bytes = _READ_MEMORY_BYTES if (folder / "tokenizer.json").exists() else _CONVERT_MEMORY_BYTES
        self._jobs = TextQueue(
            "the tokenizer's files",
            Configure(source=None, memory_bytes=memory_bytes, niceness=0),
            TextLimits(memory_bytes=memory_bytes, max_wait_s=math.inf),
            READ_PROGRAM,
        )

    def __enter__(self) -> "TokenizerReader":
        self._jobs.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.close()

    @property
    def pid(self) -> int | None:
        """The process, once it has started."""
        return self._jobs.pid

    def read(self) -> TextTokenizer:
        """The checkpoint's tokenizer. `CheckpointError` when it has none that can be read within the limits. Blocks for
        seconds."""
        request = TextRequest(
            [ReadTokenizer(str(self._folder))],
            f"reading the tokenizer in {self._folder}",
            _READ_TIMEOUT_S,
            advice="copy its files from the model's source",
        )
        try:
            source = expect(self._jobs.submit(request).result()[0], TokenizerSource)
        except UserError as error:
            raise CheckpointError(str(error)) from None
        return source.tokenizer()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that a prompt begins with. `UserError` beyond the limits."""
        job = Encode(texts=[text], add_special_tokens=True, max_tokens=None)
        request = TextRequest([job], "the tokenizer", _READ_TIMEOUT_S)
        (packed,) = expect(self._jobs.submit(request).result()[0], TokenIds).of_texts
        return array.array("I", packed).tolist()


def read_tokenizer(folder: Path) -> TextTokenizer:
    """As `TokenizerReader.read`, where nothing is to be encoded."""
    with TokenizerReader(folder) as reader:
        return reader.read()
