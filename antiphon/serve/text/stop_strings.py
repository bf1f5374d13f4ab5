"""Finds stop strings in an answer, piece by piece.

Every stop string has a state: the length of its longest prefix that ends the text so far, moved on by one character at
a time with the failure function of Knuth, Morris and Pratt (1977). The longest state of all is how many characters must
wait. So nothing depends on where the pieces were cut, and a character costs the same however long the stop strings are.
When several match, the one that is complete first wins; of those complete at the same character, the longest.

Special tokens usually leave no trace in the text, so that a search in it would never find ``<|im_end|>``. A stop string
that names special tokens is searched for in a second text, where each of them stands as one character that no text has
(a lone surrogate). What that search lets through goes on to the search in the text that the client sees. So a stop
string is found wherever a reader of either text would find it, and the text before it is the same as without.

Rejected: making such a stop string a stop token. It would not find a special token within a longer string, and
`min_tokens` would forbid the token where it only has to pass over it.
"""

from functools import lru_cache

from antiphon.base.errors import UserError
from antiphon.serve.text.tokenizer import TextTokenizer

_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


@lru_cache(64)  # an answer of n has the stop strings of the others
def _failure_function(pattern: str) -> list[int]:
    """`failure[i]`: length of the longest proper prefix of `pattern[:i + 1]` that is also its suffix."""
    failure = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = failure[length - 1]
        length += pattern[position] == pattern[length]
        failure[position] = length
    return failure


class StopStringMatcher:
    """One sequence's stop strings. `matched` is the one that was found, then the matcher is spent."""

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        assert all(stop_strings), "empty stop strings are refused by the request's validation"
        self.matched: str | None = None
        self._patterns = stop_strings
        self._failures = [_failure_function(pattern) for pattern in stop_strings]
        self._states = [0] * len(stop_strings)
        self._held = ""

    def feed(self, piece: str) -> str:
        """Take new text, return what is certain not to belong to a stop string (all of it before a match)."""
        assert self.matched is None, "the sequence has ended"
        text = self._held + piece
        for position in range(len(self._held), len(text)):
            self._advance(text[position])
            if self.matched is not None:
                self._held = ""
                return text[: position + 1 - len(self.matched)]
        num_held = max(self._states)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text that was held back for a match that did not come. Call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> None:
        for number, (pattern, failure) in enumerate(zip(self._patterns, self._failures, strict=True)):
            length = self._states[number]
            while length and pattern[length] != character:
                length = failure[length - 1]
            length += pattern[length] == character
            self._states[number] = length
            if length == len(pattern) and (self.matched is None or length > len(self.matched)):
                self.matched = pattern


class StopStrings:
    """What the answers of one request are searched for.

    `marks`: the character that stands for a special token, by id. `marked`: the stop strings that name some, by the
    same string with their characters."""

    def __init__(self, tokenizer: TextTokenizer, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self.marks: dict[int, str] = {}
        self.marked: dict[str, str] = {}
        specials = tokenizer.token_bytes.special_ids
        for text in texts:
            named = [special for special in specials if special in text]
            marked = text
            for special in sorted(named, key=len, reverse=True):
                marked = marked.replace(special, self._mark(specials[special]))
            if named:
                self.marked[marked] = text

    def _mark(self, token_id: int) -> str:
        if len(self.marks) == _NUM_SURROGATES and token_id not in self.marks:
            raise UserError(f"stop names more than {_NUM_SURROGATES} special tokens: send fewer")
        return self.marks.setdefault(token_id, chr(_FIRST_SURROGATE + len(self.marks)))


class StopSearch:
    """The search in one answer. `matched` is the stop string that was found; then the search is over."""

    def __init__(self, stops: StopStrings) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._in_text = StopStringMatcher(stops.texts)
        self._in_marked = StopStringMatcher(tuple(stops.marked)) if stops.marked else None
        self._seen: dict[str, str] = {}  # what the text has of a token, by its mark

    def feed(self, piece: str, token_id: int | None = None) -> str:
        """Take what token `token_id` adds to the text, return what is certain not to belong to a stop string (all of it
        before a match)."""
        if self._in_marked is None:
            return self._pass_on(piece)
        if token_id is not None and (mark := self._stops.marks.get(token_id)) is not None:
            self._seen[mark] = piece
            piece = mark
        text = self._pass_on(self._unmarked(self._in_marked.feed(piece)))
        if self.matched is None and self._in_marked.matched is not None:
            text += self._in_text.flush()
            self.matched = self._stops.marked[self._in_marked.matched]
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether a stop string names this special token."""
        return token_id in self._stops.marks

    def flush(self, piece: str) -> str:
        """The answer ends with `piece`: all of it that was held back, up to a match that comes now. Call it once."""
        text = self.feed(piece)
        if self.matched is None and self._in_marked is not None:
            text += self._pass_on(self._unmarked(self._in_marked.flush()))
        return text if self.matched is not None else text + self._in_text.flush()

    def _pass_on(self, piece: str) -> str:
        text = self._in_text.feed(piece)
        self.matched = self._in_text.matched
        return text

    def _unmarked(self, text: str) -> str:
        for mark, seen in self._seen.items():
            text = text.replace(mark, seen)
        return text
