"""From documents to token ids: which document is held out, which ids are learned, and what is refused.

1. A document's side is a hash of its content: the same text stays on its side, whatever else is there.
2. Control tokens in a text are text, unless the source says otherwise: a page about "<|im_end|>" would end a turn. What
   a chat template writes around messages is control; so templates are encoded with their tokens.
3. An id that the model has no embedding for is an error here, with text and file, not an index out of range in step
   3,000.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from antiphon.base.errors import UserError
from antiphon.specs.model import ModelSpec
from antiphon.train.chat_texts import ChatTexts, LearnedText
from antiphon.train.config_data import DataConfig, SourceConfig
from antiphon.train.documents import Document

Ids = np.ndarray[Any, np.dtype[np.int64]]
_MOST_SHOWN = 60  # characters of a text in a message


@dataclass(frozen=True)
class EncodedDocument:
    """The ids of a document, which of them are learned, and the bytes of its text."""

    ids: Ids
    learned: np.ndarray[Any, np.dtype[np.bool_]]
    num_bytes: int


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder with a `tokenizer.json`, or in that file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # the library's own types are Exception and a panic, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{file}: no tokenizer can be read ({error}): set data.tokenizer") from error


def ids_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest that has an id for each token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class Encoder:
    """Encodes documents for `spec`. `tokenizer_path`: a folder, whose chat template is read if a source has chats."""

    def __init__(
        self, tokenizer: Tokenizer, tokenizer_path: Path, spec: ModelSpec, config: DataConfig, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._config = config
        self._seed = seed
        folder = tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent
        self._chats = ChatTexts.read(folder) if any(each.is_chat for each in config.tokenized()) else None
        self._never_trained_on = {each.name for each in config.evaluation}
        self.dtype = ids_dtype(spec.vocab_size)

    def encode(
        self, documents: Sequence[tuple[Document, Path]], source: SourceConfig
    ) -> Iterator[tuple[bool, EncodedDocument]]:
        """(held out, ids) of each of these documents of `source`; of a chat, there may be several."""
        keys = [_content(document) for document, _ in documents]
        whole = source.name in self._never_trained_on
        held_out = [whole or _is_held_out(key, self._config.held_out) for key in keys]
        self._tokenizer.encode_special_tokens = not (source.control_tokens or source.kind == "chat")
        if source.is_chat:
            assert self._chats is not None
            for (document, path), is_out in zip(documents, held_out, strict=True):
                for text in self._chats.of(document.record or {}, str(path)):
                    yield is_out, self._chat(text, path)
            return
        cut = self._config.pieces
        pieces = [
            [document.text] if is_out or not cut else _pieces(document.text, cut, f"{self._seed}/{key.hex()}")
            for (document, _), is_out, key in zip(documents, held_out, keys, strict=True)
        ]
        texts = [each for of in pieces for each in of]
        encodings = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        end = np.array([self._spec.eos_token_ids[0]], np.int64)
        for (document, path), of_document, is_out in zip(documents, pieces, held_out, strict=True):
            found = zip(of_document, islice(encodings, len(of_document)), strict=True)
            ids = np.concatenate([*(self._checked(encoding, text, path) for text, encoding in found), end])
            yield is_out, EncodedDocument(ids, np.ones(len(ids), bool), len(document.text.encode()))

    def _chat(self, text: LearnedText, path: Path) -> EncodedDocument:
        """A loss is taken on what the assistant says; where that has no end mark, one follows."""
        encoding = self._tokenizer.encode(text.text, add_special_tokens=False)
        ids = self._checked(encoding, text.text, path)
        learned = np.array(
            [any(begin < last and end > first for first, last in text.spans) for begin, end in encoding.offsets], bool
        )
        if not (learned & np.isin(ids, self._spec.eos_token_ids)).any():
            ids, learned = np.append(ids, self._spec.eos_token_ids[0]), np.append(learned, True)
        return EncodedDocument(ids, learned, len(text.text.encode()))

    def _checked(self, encoding: Encoding, text: str, path: Path) -> Ids:
        """The ids of `text`."""
        ids = np.array(encoding.ids, np.int64)
        if len(ids) and ids.max() >= self._spec.vocab_size:
            place = int((ids >= self._spec.vocab_size).argmax())
            encoding = self._tokenizer.encode(text, add_special_tokens=False)  # with offsets
            begin = encoding.offsets[place][0]
            raise UserError(
                f"{path}: {encoding.tokens[place]!r} in {text[begin : begin + _MOST_SHOWN]!r} is token {ids[place]}, "
                f"the model's embedding has {self._spec.vocab_size}: the tokenizer is not the model's, set "
                "data.tokenizer or exclude the file"
            )
        return ids


def _content(document: Document) -> bytes:
    """What decides on which side a document is."""
    text = document.text if document.record is None else json.dumps(document.record, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _is_held_out(content: bytes, part: float) -> bool:
    return int.from_bytes(content, "big") < part * 2**64


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
