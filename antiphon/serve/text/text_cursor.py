"""A place in a text that is still being written, and the steps by which readers move on.

A step is a generator that pauses where it needs more text and goes on when there is more. So a reader is written as if
the whole text were there, and reads the same wherever the text was cut into pieces. Rejected: a table of states for
each format, in which a mark of ten characters is ten states.
"""

from collections.abc import Callable, Generator, Sequence
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
