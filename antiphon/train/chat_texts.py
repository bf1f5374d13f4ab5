"""Chats as texts, by the checkpoint's chat template, with the parts that are learned: what the assistant says.

Where the template marks them (`{% generation %}`), its marks hold. Otherwise each answer is what the template writes
for it behind the prompt of a generation, up to the next message: what the model would have been asked for. Some
templates rewrite earlier turns (Qwen3 leaves out old reasoning), so a whole chat does not show every answer as it was
given: then each answer is a text of its own, with what came before it as its prompt.

Rejected: looking for the template's words for the assistant's turn. Every family has others, and a message may hold
them.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.models.chat_environment import chat_environment
from antiphon.specs.checked import read_mapping, read_text

_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_CONFIG, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_MARK = secrets.token_hex(8)  # around what a template marks; no text can hold it
_BEGIN, _END = f"<{_MARK}>", f"</{_MARK}>"
_MARKED = re.compile(f"{_BEGIN}|{_END}")
_log = get_logger("train")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LearnedText:
    """A text and the ranges of its characters that are learned."""

    text: str
    spans: tuple[tuple[int, int], ...]


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
            return [LearnedText(prompt + answer, ((len(prompt), len(prompt + answer)),))]
        messages, tools = _messages(record, where), record.get("tools") or None
        if not any(each["role"] == "assistant" for each in messages):
            self._say(f"{where}: chats without an assistant's turn are passed over")
            return []
        if self._has_marks:
            return [_unmarked(self._render(messages, tools, where))]
        return self._by_turn(messages, tools, where)

    def _by_turn(self, messages: Messages, tools: Any, where: str) -> list[LearnedText]:
        whole, found = self._render(messages, tools, where), []
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
            found.append(LearnedText(until, ((len(prompt), max(len(prompt), len(until.rstrip()))),)))
        if all(whole.startswith(each.text) for each in found):
            return [LearnedText(whole, tuple(each.spans[0] for each in found))]
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
    return LearnedText("".join(parts) + marked[last:], tuple(spans))


def _content_of(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _json(file: Path) -> dict[str, Any]:
    return read_mapping(file) if file.is_file() else {}
