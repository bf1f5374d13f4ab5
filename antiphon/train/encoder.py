"""From documents to token ids: chats as texts, which document is held out, which ids are learned, and what is refused.

1. A document's side is a hash of its content: the same text stays on its side, whatever else is there.
2. Control tokens in a text are text, unless the source says otherwise: a page about "<|im_end|>" would end a turn. What
   a chat template writes around messages is control; so templates are encoded with their tokens.
3. An id that the model has no embedding for is an error here, with text and file, not an index out of range in step
   3,000.
4. Chats are written by the checkpoint's template; what the assistant says is learned. Where the template marks that
   (`{% generation %}`), its marks hold. Otherwise each answer is what the template writes for it behind the prompt of a
   generation, up to the next message: what the model would have been asked for. Some templates rewrite earlier turns
   (Qwen3 leaves out old reasoning), so a whole chat does not show every answer as it was given: then each answer is a
   text of its own, with what came before it as its prompt.

Rejected: looking for the template's words for the assistant's turn. Every family has others, and a message may hold
them.
"""

import hashlib
import json
import random
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from tokenizers import Encoding, Tokenizer

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.models.chat_environment import chat_environment
from antiphon.specs.checked import read_mapping, read_text
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import DataConfig, SourceConfig
from antiphon.train.documents import Document

Ids = np.ndarray[Any, np.dtype[np.int64]]
_MOST_SHOWN = 60  # characters of a text in a message
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_CONFIG, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_MARK = secrets.token_hex(8)  # around what a template marks; no text can hold it
_BEGIN, _END = f"<{_MARK}>", f"</{_MARK}>"
_MARKED = re.compile(f"{_BEGIN}|{_END}")
_log = get_logger("train")
Messages = Sequence[Mapping[str, Any]]


LearnedText = tuple[str, tuple[tuple[int, int], ...]]  # a text and the ranges of its characters that are learned


class ChatTexts:
    """Writes chats by `template`; a record of prompt and answer is these two, one behind the other, and needs none."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], where: str) -> None:
        """`UserError` where the template cannot be compiled; `where` it is from. Empty: there is none."""
        self._special_tokens = special_tokens
        self._where = where
        self._said: set[str] = set()
        try:
            self._template = chat_environment(_BEGIN, _END).from_string(template) if template else None
        except TemplateError as error:
            raise UserError(f"{where}: the chat template cannot be used ({error}): correct it") from error
        self._has_marks = re.search(r"\{%-?\s*generation", template) is not None

    @staticmethod
    def read(folder: Path) -> "ChatTexts":
        """By the template in a checkpoint's or tokenizer's folder."""
        named: Any = _json(folder / _TEMPLATE_JSON).get("chat_template") or _json(folder / _CONFIG).get("chat_template")
        if (folder / _TEMPLATE).is_file():
            named = read_text(folder / _TEMPLATE)
        if isinstance(named, list):  # of several, the one without a purpose of its own
            named = {each.get("name"): each.get("template") for each in named}.get("default")
        tokens = {
            key: _content_of(value) for key, value in (_json(folder / _SPECIAL) | _json(folder / _CONFIG)).items()
        }
        special = {key: value for key, value in tokens.items() if key.endswith("_token") and value is not None}
        return ChatTexts(named if isinstance(named, str) else "", special, str(folder))

    def of(self, record: Mapping[str, Any], where: str) -> list[LearnedText]:
        """The texts of one record: one, unless the template rewrites earlier turns. `where`: for messages."""
        if "answer" in record:
            prompt, answer = str(record["prompt"]), str(record["answer"])
            return [(prompt + answer, ((len(prompt), len(prompt + answer)),))]
        messages, tools = _messages(record, where), record.get("tools") or None
        if not any(each["role"] == "assistant" for each in messages):
            self._say(f"{where}: chats without an assistant's turn are passed over")
            return []
        if self._has_marks:
            return [_unmarked(self._render(messages, tools, where))]
        return self._by_turn(messages, tools, where)

    def _by_turn(self, messages: Messages, tools: Any, where: str) -> list[LearnedText]:
        whole, found = self._render(messages, tools, where), list[LearnedText]()
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = self._render(messages[: place + 1], tools, where)
            prompt = self._render(messages[:place], tools, where, prompt=True)
            if not until.startswith(prompt):
                self._say(
                    f"{self._where}: what the template writes to begin an answer is not in its chats: learned too"
                )
                prompt = self._render(messages[:place], tools, where) if place else ""
            if not until.startswith(prompt):
                raise UserError(
                    f"{where}: the template of {self._where} writes message {place + 1} into what is before it, so its "
                    "part cannot be told: mark it with {% generation %} in the template"
                )
            found.append((until, ((len(prompt), max(len(prompt), len(until.rstrip()))),)))
        if all(whole.startswith(text) for text, _ in found):
            return [(whole, tuple(span for _, (span,) in found))]
        self._say(f"{self._where}: the template rewrites earlier turns: each answer is a text of its own")
        return found

    def _render(self, messages: Messages, tools: Any, where: str, *, prompt: bool = False) -> str:
        if self._template is None:
            raise UserError(
                f"{self._where}: has no chat template ({_TEMPLATE}), which data.kind 'chat' needs: add one, name "
                "another folder in data.tokenizer, or use kind 'answers'"
            )
        names = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return self._template.render(**self._special_tokens, **names)
        except Exception as error:  # a program of the checkpoint: it may raise anything
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise UserError(f"{where}: the chat template does not accept these messages: {reason}") from error

    def _say(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)


def template_files(folder: Path) -> list[Path]:
    """What of a folder decides how chats are written."""
    return [folder / name for name in (_TEMPLATE, _TEMPLATE_JSON, _CONFIG, _SPECIAL) if (folder / name).is_file()]


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Without nulls, which tables are full of and templates would write out."""
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise UserError(f"{where}: messages have to be a list of objects with role and content: convert them")
    return [{key: value for key, value in each.items() if value is not None} for each in messages]


def _unmarked(marked: str) -> LearnedText:
    """`marked` without marks; what was between them is learned."""
    parts: list[str] = []
    length, begin, spans, last = 0, 0, [], 0
    for found in _MARKED.finditer(marked):
        parts.append(marked[last : found.start()])
        length, last = length + found.start() - last, found.end()
        if found.group() == _BEGIN:
            begin = length
        elif length > begin:
            spans.append((begin, length))
    return "".join(parts) + marked[last:], tuple(spans)


def _content_of(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _json(file: Path) -> dict[str, Any]:
    return read_mapping(file) if file.is_file() else {}


EncodedDocument = tuple[Ids, np.ndarray[Any, np.dtype[np.bool_]], int]  # ids, which are learned, bytes of the text


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder with a `tokenizer.json`, or in that file. It neither cuts nor pads texts, which such a
    file may ask for."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # the library's own types are Exception and a panic, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{file}: no tokenizer can be read ({error}): set data.tokenizer") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
                for text, spans in self._chats.of(document.record or {}, str(path)):
                    yield is_out, self._chat(text, spans, path)
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
            yield is_out, (ids, np.ones(len(ids), bool), len(document.text.encode()))

    def _chat(self, text: str, spans: Sequence[tuple[int, int]], path: Path) -> EncodedDocument:
        """A loss is taken on what the assistant says; where that has no end mark, one follows."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._checked(encoding, text, path)
        learned = np.array(
            [any(begin < last and end > first for first, last in spans) for begin, end in encoding.offsets], bool
        )
        if not (learned & np.isin(ids, self._spec.eos_token_ids)).any():
            ids, learned = np.append(ids, self._spec.eos_token_ids[0]), np.append(learned, True)
        return ids, learned, len(text.encode())

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
