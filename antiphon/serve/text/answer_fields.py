"""Both ends of a reader of answers: the text that is still being written, and what it turned out to be.

1. `TextCursor`: a place in the text, and the steps by which a reader moves on. A step is a generator that pauses where
   it needs more text and goes on when there is more. So a reader is written as if the whole text were there, and reads
   the same wherever the text was cut into pieces.
2. `AnswerFields`: reasoning, text and calls, piece by piece, and which white space is a part of them. White space that
   stands alone between marks belongs to the format, as do the line breaks around reasoning. Beside text it is text.

Rejected: a table of states for each format, in which a mark of ten characters is ten states.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class TextCursor:
    """`ended`: no more text comes."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def push_back(self, text: str) -> None:
        """Have `text` read again."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def next(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        self._at += 1
        return self._text[self._at - 1]

    def until(self, marks: Sequence[str], say: Callable[[str], None]) -> Steps[str]:
        """Give `say` what comes before the first of `marks`, as it comes. Returns the mark; "" at the end."""
        while True:
            places = [(place, mark) for mark in marks if (place := self._text.find(mark, self._at)) >= 0]
            if places:
                place, mark = min(places)
                self._pass_to(place, say)
                self._at += len(mark)
                return mark
            if self.ended:
                self._pass_to(len(self._text), say)
                return ""
            self._pass_to(self._first_possible(marks), say)
            yield

    def option(self, options: Sequence[str]) -> Steps[tuple[str, str]]:
        """Pass over white space and one of `options`. Returns it, "" if none of them stands there, and the white
        space."""
        spaces: list[str] = []
        while character := (yield from self.next()):
            if not character.isspace():
                self._at -= 1
                break
            spaces.append(character)
        longest = max(map(len, options), default=0)
        while True:
            waiting = self._text[self._at : self._at + longest]
            for option in options:
                if waiting.startswith(option):
                    self._at += len(option)
                    return option, "".join(spaces)
            if self.ended or not any(option.startswith(waiting) for option in options):
                return "", "".join(spaces)
            yield

    def word(self, ends: Sequence[str], most: int) -> Steps[tuple[str, str]]:
        """At most `most` characters and the one of `ends` behind them; where there is none, all is read again later,
        and the end is ""."""
        read = ""
        while len(read) <= most and (character := (yield from self.next())):
            read += character
            for end in ends:
                if read.endswith(end) and (read.strip() or not end.isspace()):
                    return read[: -len(end)], end
        self.push_back(read)
        return read, ""

    def _pass_to(self, place: int, say: Callable[[str], None]) -> None:
        if place > self._at:
            say(self._text[self._at : place])
            self._at = place

    def _first_possible(self, marks: Sequence[str]) -> int:
        """Where the end of the text may be the beginning of a mark."""
        text, end = self._text, len(self._text)
        for place in range(max(self._at, end - max(map(len, marks), default=0) + 1), end):
            if any(mark.startswith(text[place:]) for mark in marks):
                return place
        return end


@dataclass(slots=True)
class CallPiece:
    """News of one call: `id` and `name` come with the first piece, the pieces' arguments make up the whole."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Reading:
    """What a piece of generated text turned out to be: in this order, and at most one piece of each call."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class CallCompleteError(Exception):
    """The one call that was wanted is complete."""


class AnswerFields:
    """Collects the pieces of one answer. `forced`: once it `is_over`, what was held back of a call is no text.
    `had_fields`: there was reasoning, or a call; `has_thought`, `has_text`: there was some."""

    def __init__(self, new_call_id: Callable[[], str], *, at_most_one: bool, forced: bool) -> None:
        self.num_calls = 0
        self.had_fields = self.has_thought = self.has_text = self.has_arguments = False
        self.is_over = self.is_reasoning = False
        self.is_fresh = True  # no text since the last mark
        self._new_call_id = new_call_id
        self._at_most_one = at_most_one
        self._forced = forced
        self._after_reasoning = False
        self._open_call: list[str] | None = None  # the arguments so far of a call that has not ended
        self._spaces: list[str] = []  # white space that is text only if it stands beside text
        self._line_breaks = ""  # of the reasoning, that may be its last ones
        self._reading = Reading()

    def take(self) -> Reading:
        """What has come since the last time."""
        reading, self._reading = self._reading, Reading()
        return reading

    def take_rest(self) -> Reading:
        """What is left, as `take` gives it; the last call."""
        self._reading.reasoning += self._line_breaks
        if not self.had_fields:
            self._reading.text += "".join(self._spaces)
        return self.take()

    def begin_thought(self) -> None:
        """Reasoning comes; a line break parts it from earlier reasoning."""
        self.is_reasoning, self.had_fields, self._spaces = True, True, []
        self._line_breaks = "\n" if self.has_thought else ""

    def say(self, text: str) -> None:
        """Text for the user."""
        if self._forced and self.is_over:
            return
        if self.is_fresh:
            said = text.lstrip()
            self._spaces.append(text[: len(text) - len(said)])
            if not said:
                return
            spaces, self._spaces = "".join(self._spaces), []
            text = (spaces.lstrip("\n") if self._after_reasoning else spaces) + said
            self.is_fresh = self._after_reasoning = False
        self.has_text = True
        self._reading.text += text

    def think(self, text: str) -> None:
        """Reasoning, without the line breaks around it."""
        if not self.has_thought:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self.has_thought = True
            self._reading.reasoning += self._line_breaks + kept
            self._line_breaks = ""
        self._line_breaks += text[len(kept) :]

    def end_thought(self) -> None:
        """Line breaks at its end, and before the text that follows, belong to the format."""
        self.is_reasoning, self._line_breaks, self._after_reasoning = False, "", True

    def begin_call(self, name: str, own_id: str | None = None) -> None:
        """A call comes, with an id that the model wrote or a fresh one."""
        self._spaces, self.is_fresh, self.had_fields, self.has_arguments = [], True, True, False
        self._after_reasoning, self._open_call = False, []
        self._reading.calls.append(CallPiece(self.num_calls, own_id or self._new_call_id(), name))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        """More arguments of the last call."""
        if not self.has_arguments:
            arguments = arguments.lstrip()
        if not arguments:
            return
        self.has_arguments = True
        index = self.num_calls - 1
        if not (self._reading.calls and self._reading.calls[-1].index == index):
            self._reading.calls.append(CallPiece(index))
        self._reading.calls[-1].arguments += arguments
        if self._open_call is not None:
            self._open_call.append(arguments)

    @property
    def is_call_cut(self) -> bool:
        """The last call has not ended, and its arguments are no whole JSON so far."""
        if self._open_call is None:
            return False
        try:
            json.loads("".join(self._open_call))
        except (ValueError, RecursionError):
            return True
        return False

    def end_call(self) -> None:
        """`CallCompleteError` when no other is wanted."""
        if not self.has_arguments:
            self.add_arguments("{}")
        self._spaces, self.is_fresh, self._open_call = [], True, None
        if self._at_most_one:
            raise CallCompleteError
