"""Reads calls of tools out of a generated text, while it is being generated.

Models write a call as a JSON object with a name and arguments, each family between marks of its own (`ToolFormat`).
The reader goes through the text a character at a time: what is no call comes out as text; of a call come first its
name, then its arguments as they are written. So what streams and what is answered at once are the same, wherever the
text was cut, and a long argument need not be waited for.

Something is a call when its name is one of the tools offered. Until that is known its characters wait; if it turns out
to be something else they come out as text. White space next to a call is left out. Arguments are passed on as the model
wrote them: only a grammar (`tool_grammar`) promises that they are JSON and fit their schema.

Rejected: a parser per model family with expressions over the whole text so far; it reads everything again for every
token, and streams something else than it answers.
"""

import json
import secrets
import string
from dataclasses import dataclass, field

from antiphon.serve.text.stop_strings import StopStringMatcher


@dataclass(frozen=True)
class ToolFormat:
    """How a model family marks its calls. `begin` "": an answer that begins with a call's JSON consists of calls."""

    name: str
    begin: str
    end: str
    arguments_key: str

    def new_call_id(self) -> str:
        """A fresh id; Mistral's templates refuse ids that are not nine letters or digits."""
        if self is MISTRAL:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat("Hermes", "<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("Mistral", "[TOOL_CALLS]", "", "arguments")
PLAIN_JSON = ToolFormat("plain JSON", "", "", "parameters")

_ARGUMENTS = {"arguments", "parameters"}

# Marks of formats that are no JSON objects with a name and arguments.
_UNREADABLE = ("<function=", "<arg_key>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<|channel|>")


def tool_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model; None when it is one that cannot be read here."""
    if any(mark in chat_template for mark in _UNREADABLE):
        return None
    return next((known for known in (HERMES, MISTRAL) if known.begin in chat_template), PLAIN_JSON)


@dataclass(slots=True)
class CallPiece:
    """News of one call: `id` and `name` come with the first piece, the pieces' arguments make up the whole."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Reading:
    """What a piece of generated text turned out to be: text, and at most one piece of each call."""

    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class _CallObject:
    """One JSON object, a character at a time: its name, its arguments, whether it can be a call and where it ends."""

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.is_call: bool | None = None  # None: not known yet
        self.finished = False
        self.has_arguments = False
        self._names = names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._literal: list[str] = []  # the key or value of the outer object that is being read
        self._arguments: list[str] = []
        self._in_arguments = False

    def take_arguments(self) -> str:
        """The arguments read since the last time, to be asked for once it is known to be a call."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, character: str) -> None:
        if self._in_string:
            self._keep(character)
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif self._depth == 1 and character in ":,}]":
            self._end_part(character)
        elif self._depth > 1 or not character.isspace():
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth > 1 or character not in "{[":
                self._keep(character)

    def _keep(self, character: str) -> None:
        if self._key in _ARGUMENTS and character == "{" and not (self._literal or self.has_arguments):
            self.has_arguments = self._in_arguments = True
        if self._in_arguments:
            self._arguments.append(character)
        else:
            self._literal.append(character)

    def _end_part(self, character: str) -> None:
        literal, self._literal, self._in_arguments = "".join(self._literal), [], False
        if character == ":" and self._key is None:
            self._key = str(_decoded(literal))
            if self.is_call is None and self._key not in {"name", "type", "id", *_ARGUMENTS}:
                self.is_call = False
        elif self._key is not None:
            self._end_value(self._key, literal)
            self._key = None
        if character in "}]":
            self.finished = True
            self.is_call = bool(self.is_call)

    def _end_value(self, key: str, literal: str) -> None:
        if key == "name" and self.is_call is None:
            name = _decoded(literal)
            self.is_call = isinstance(name, str) and name in self._names
            self.name = str(name)
        elif key in _ARGUMENTS and not self.has_arguments:
            value = _decoded(literal)  # some models write the object as a text, or null for none
            self.has_arguments = value is not None
            self._arguments.append("" if value is None else value if isinstance(value, str) else literal)


def _decoded(literal: str) -> object:
    try:
        value: object = json.loads(literal)
    except ValueError:
        return literal
    return value


class ToolCallReader:
    """The calls of one answer. With `at_most_one` the answer is `satisfied` once a call is complete."""

    def __init__(self, form: ToolFormat, names: frozenset[str], *, at_most_one: bool = False) -> None:
        self.num_calls = 0
        self.satisfied = False
        self._format = form
        self._names = names
        self._at_most_one = at_most_one
        self._reading = Reading()
        self._spaces: list[str] = []  # white space that is text only if it is not next to a call
        self._after_call = False  # no text since the last call
        self._begin: StopStringMatcher | None = None  # looks for the next mark
        self._raw: list[str] | None = None  # what was read since the mark or the last call; None: outside
        self._object: _CallObject | None = None
        if form.begin:
            self._begin = StopStringMatcher((form.begin,))
        else:
            self._raw = []

    @property
    def mark(self) -> str:
        """What begins a call; where it is a special token, it must be part of the text that is fed."""
        return self._format.begin

    def feed(self, text: str) -> Reading:
        """Take more of the answer; what is known of it now."""
        for character in text:
            if self.satisfied:
                break
            if self._object is not None:
                self._in_object(self._object, character)
            elif self._raw is not None:
                self._between_objects(self._raw, character)
            else:
                self._outside(character)
        return self._take()

    def flush(self) -> Reading:
        """What was held back, once the answer is over."""
        if self._object is None or self._object.is_call is None:
            if self._begin is not None:
                self._say(self._begin.flush())
            raw = self._raw or []
            self._leave(says=self._is_fresh(raw) or not self._may_be_end(raw))
        if not self._after_call:
            self._reading.text += "".join(self._spaces)
        self._spaces.clear()
        return self._take()

    def _take(self) -> Reading:
        reading, self._reading = self._reading, Reading()
        return reading

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._reading.text += "".join(self._spaces) + said
            self._spaces.clear()
            self._after_call = False
        self._spaces.append(text[len(said) :])

    def _outside(self, character: str) -> None:
        if self._begin is None:
            self._say(character)
            return
        self._say(self._begin.feed(character))
        if self._begin.matched is not None:
            self._begin = None
            self._raw = list(self._format.begin)

    def _between_objects(self, raw: list[str], character: str) -> None:
        raw.append(character)
        if character.isspace():
            return
        if character == "{":
            self._object = _CallObject(self._names)
            self._object.feed(character)
        elif character in "],;" and not self._is_fresh(raw):
            raw.clear()
        elif character in "[],;" and self._is_fresh(raw):
            pass
        elif self._may_be_end(raw):
            if "".join(raw).strip() == self._format.end:
                self._leave(says=False)
        else:
            num_said = len(self._format.begin) if self._is_fresh(raw) else 0
            self._leave(says=False)
            self._say("".join(raw[:num_said]))
            for waiting in raw[num_said:]:  # the beginning of another mark, perhaps
                self._outside(waiting)

    def _is_fresh(self, raw: list[str]) -> bool:
        """Whether no call was read since the mark."""
        begin = self._format.begin
        return "".join(raw[: len(begin)]) == begin if begin else self.num_calls == 0

    def _may_be_end(self, raw: list[str]) -> bool:
        return self._format.end.startswith("".join(raw).strip())

    def _in_object(self, read: _CallObject, character: str) -> None:
        was_call = read.is_call
        read.feed(character)
        if was_call is None:
            assert self._raw is not None
            self._raw.append(character)
            if read.is_call:
                self._begin_call(read)
        if read.is_call:
            self._add_arguments(read.take_arguments())
        if read.is_call is False:
            self._leave()
        elif read.finished:
            if not read.has_arguments:
                self._add_arguments("{}")
            self._object = None
            self.satisfied = self._at_most_one

    def _begin_call(self, read: _CallObject) -> None:
        self._spaces.clear()
        self._raw, self._after_call = [], True
        piece = CallPiece(self.num_calls, self._format.new_call_id(), read.name)
        self._reading.calls.append(piece)
        self.num_calls += 1

    def _add_arguments(self, arguments: str) -> None:
        if not arguments:
            return
        index = self.num_calls - 1
        if not (self._reading.calls and self._reading.calls[-1].index == index):
            self._reading.calls.append(CallPiece(index))
        self._reading.calls[-1].arguments += arguments

    def _leave(self, *, says: bool = True) -> None:
        """Go back to text; what was read since the mark or the last call is text, too, unless it is a mark."""
        raw, self._raw, self._object = self._raw, None, None
        self._begin = StopStringMatcher((self._format.begin,)) if self._format.begin else None
        if raw and says:
            self._say("".join(raw))
