"""Reads one call that is a JSON object with a name and arguments, a character at a time, and JSON that ends with its
last bracket. Arguments are passed on as the model wrote them: only a grammar promises that they are JSON."""

import json

_ARGUMENTS = {"arguments", "parameters"}


class CallObject:
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
    except (ValueError, RecursionError):
        return literal
    return value


class BalancedJson:
    """Where a JSON value that begins with a bracket ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, character: str) -> bool:
        """Whether `character` is its last bracket."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return character in "}]" and self._depth <= 0
