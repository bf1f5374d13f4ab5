"""Finds stop strings in text that arrives in pieces, and lets nothing out that might be the beginning of one.

Every stop string has a matcher state: the length of its longest prefix that ends the text so far, moved on by one
character at a time with the failure function of Knuth, Morris and Pratt (1977). The longest state of all is how many
characters must wait. So the result does not depend on where the pieces were cut, and the cost per character does not
depend on how long the stop strings are.

When several match, the one that is complete first wins; of those complete at the same character, the longest.
"""


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
        if not self._patterns:
            return piece
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
