"""What an answer turned out to be, piece by piece: reasoning, text, calls; and which white space is a part of it.

White space that stands alone between marks belongs to the format, as do the line breaks around reasoning. Beside text
it is text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


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
        self._spaces: list[str] = []  # white space that is text only if it stands beside text
        self._line_breaks = ""  # of the reasoning, that may be its last ones
        self._reading = Reading()

    def take(self) -> Reading:
        """What has come since the last time."""
        reading, self._reading = self._reading, Reading()
        return reading

    def take_rest(self) -> Reading:
        """As `take`, for the last time."""
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
        self._after_reasoning = False
        self._reading.calls.append(CallPiece(self.num_calls, own_id or self._new_call_id(), name))
        self.num_calls += 1

    def add_arguments(self, arguments: str) -> None:
        """Of the last call."""
        if not self.has_arguments:
            arguments = arguments.lstrip()
        if not arguments:
            return
        self.has_arguments = True
        index = self.num_calls - 1
        if not (self._reading.calls and self._reading.calls[-1].index == index):
            self._reading.calls.append(CallPiece(index))
        self._reading.calls[-1].arguments += arguments

    def end_call(self) -> None:
        """`CallCompleteError` when no other is wanted."""
        if not self.has_arguments:
            self.add_arguments("{}")
        self._spaces, self.is_fresh = [], True
        if self._at_most_one:
            raise CallCompleteError
