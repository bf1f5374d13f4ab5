"""Reads a checkpoint's tokenizer in a process with limits on time and memory, before anything else looks at it.

A `tokenizer.json` is a program of patterns and tables: one that compiles without an end, wants all memory, or ends the
library that reads it must cost a command one line of error. What has been read within the limits is then built once
more where ids become text, which takes as long and as much memory again, and never less or more. Only that process
and those of `text_service` encode: patterns run on a text may take any time, whatever building them took. What the
library for grammars makes of a tokenizer is tried in the same way.

    python -m antiphon.serve.text.tokenizer_reading --fd N   # the process
"""

import array
import math
from pathlib import Path
from types import TracebackType

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.system import interruptible
from antiphon.serve.text import grammar_trial, text_process
from antiphon.serve.text.text_process import (
    Answer,
    Encode,
    Job,
    ReadTokenizer,
    TextConfigure,
    TextResult,
    TextWork,
    TokenIds,
    TokenizerSource,
    TryGrammars,
)
from antiphon.serve.text.text_queue import READ_PROGRAM, TextLimits, TextQueue, TextRequest
from antiphon.serve.text.text_service import expect
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_files import load_tokenizer

_READ_TIMEOUT_S = 60.0
_GRAMMARS_TIMEOUT_S = 15.0
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
            TextConfigure(source=None, memory_bytes=memory_bytes, niceness=0),
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

    def read(self) -> TextTokenizer:
        """The checkpoint's tokenizer. `CheckpointError` when it has none that can be read within the limits. Blocks for
        seconds."""
        what = f"reading the tokenizer in {self._folder}"
        job = ReadTokenizer(str(self._folder))
        try:
            source = expect(self._ask(job, what, _READ_TIMEOUT_S), TokenizerSource)
        except UserError as error:
            raise CheckpointError(str(error)) from None
        with interruptible():
            return source.tokenizer()

    def grammar_problem(self, vocab_size: int) -> str | None:
        """Why answers of a model of `vocab_size` ids cannot follow grammars with this tokenizer; None when they can."""
        try:
            expect(self._ask(TryGrammars(vocab_size), "making grammars", _GRAMMARS_TIMEOUT_S), TextResult)
        except UserError as error:
            return str(error)
        return None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that a prompt begins with. `UserError` beyond the limits."""
        job = Encode(texts=[text], add_special_tokens=True, max_tokens=None)
        (packed,) = expect(self._ask(job, "the tokenizer", _READ_TIMEOUT_S), TokenIds).of_texts
        return array.array("I", packed).tolist()

    def _ask(self, job: Job, what: str, timeout_s: float) -> Answer:
        request = TextRequest([job], what, timeout_s, advice="copy its files from the model's source")
        return self._jobs.submit(request).result()[0]


def read_tokenizer(folder: Path, vocab_size: int) -> TextTokenizer:
    """The tokenizer for a server of a model of `vocab_size` ids, with what is wrong with it for grammars."""
    with TokenizerReader(folder) as reader:
        tokenizer = reader.read()
        tokenizer.grammar_problem = reader.grammar_problem(vocab_size)
        return tokenizer


# --- the process -----------------------------------------------------------------------------------------------------


class ReadingWork(TextWork):
    """The jobs of a process that has no tokenizer yet, and then those of `TextWork`."""

    def answer(self, job: Job) -> Answer:
        if isinstance(job, ReadTokenizer):
            self._loaded = load_tokenizer(Path(job.folder))
            return TokenizerSource.of(self._loaded)
        if isinstance(job, TryGrammars):
            self._try_grammars(job.vocab_size)
            return TextResult("")
        return super().answer(job)

    def _try_grammars(self, vocab_size: int) -> None:
        padded = max(vocab_size, self._tokenizer.vocab_size)
        try:
            grammar_trial.load_tokenizer(self._tokenizer.backend.to_str(), padded, [0])
        except ValueError as error:
            raise UserError(f"structured output cannot use this tokenizer: {error}") from error


def main() -> None:
    """The program."""
    text_process.main(ReadingWork)


if __name__ == "__main__":
    main()
