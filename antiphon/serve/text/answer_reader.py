"""Reads what a model writes while it writes: reasoning, text for the user, calls of tools.

The dialect (`dialects`) says the marks. Marks leave no trace; everything else comes out as it comes in, and is the same
wherever the text was cut. Reasoning comes first; what looks like a call in it is none. Something is a call when its
name is one of the tools offered: until that is known its characters wait, and if it turns out to be something else they
come out as text. Of a call come first its name, then its arguments as they are written.

Rejected: a parser per model family with expressions over the whole text so far; it reads everything again for every
token, and streams something else than it answers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from antiphon.serve.text.answer_fields import AnswerFields, CallCompleteError, Reading, Steps, TextCursor
from antiphon.serve.text.call_values import (
    JSON_TYPES,
    BalancedJson,
    CallObject,
    LiteralRewriter,
    property_types,
    string_json,
    value_json,
)
from antiphon.serve.text.dialects import CHANNEL, CONSTRAIN, MESSAGE, MESSAGE_ENDS, START, CallFormat, Dialect

_MAX_NAME = 256  # characters: longer ones are no names
_DEFAULT_FORM = CallFormat(name="", structure="json")
_BRACKETS = ("{", "[", "]", ",", ";")
_RECIPIENT = re.compile(r"to=(\S+)")


def leaves_reasoning_open(dialect: Dialect, prompt: str) -> bool:
    """Whether an answer to `prompt` begins inside the reasoning."""
    form, end = dialect.reasoning, prompt.rstrip()
    if dialect.has_channels:
        return end.endswith(f"{CHANNEL}analysis{MESSAGE}")
    if form is None or end.endswith(form.end):
        return False
    return form.starts_open or end.endswith(form.begin)


class AnswerReader:
    """One answer. `tools`: the schema of each function that may be called. `at_most_one`: the answer is `satisfied`
    once a call is complete. `forced`: a grammar allows nothing but calls, so that the rest of one that was cut off is
    no text."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Mapping[str, dict[str, Any]],
        *,
        prompt: str = "",
        at_most_one: bool = False,
        forced: bool = False,
    ) -> None:
        self.satisfied = False
        self._dialect = dialect
        self._form = dialect.calls or _DEFAULT_FORM
        self._tools = tools if dialect.calls is not None or dialect.has_channels else {}
        # Marks of calls that are not read are no text, as long as they are special tokens.
        self.marks = (dialect if self._tools else dialect.without_calls).marks
        self._prompt_end = prompt.rstrip()[-_MAX_NAME:]
        self._cursor = TextCursor()
        self._out = AnswerFields(self._form.new_call_id, at_most_one=at_most_one, forced=forced)
        self._out.is_reasoning = leaves_reasoning_open(dialect, prompt)
        self._steps = self._messages() if dialect.has_channels else self._whole()

    @property
    def is_reasoning(self) -> bool:
        return self._out.is_reasoning

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    @property
    def is_call_cut(self) -> bool:
        """The answer so far ends within a call."""
        return self._out.is_call_cut

    def feed(self, text: str) -> Reading:
        """Take more of the answer; what is known of it now."""
        if text and not self.satisfied:
            self._cursor.add(text)
            self._go_on()
        return self._out.take()

    def flush(self) -> Reading:
        """What was held back, once the answer is over."""
        self._cursor.ended = self._out.is_over = True
        if not self.satisfied:
            self._go_on()
        return self._out.take_rest()

    def _go_on(self) -> None:
        try:
            next(self._steps, None)
        except CallCompleteError:
            self.satisfied = True

    # --- reasoning, then text and calls ------------------------------------------------------------------------------

    def _whole(self) -> Steps[None]:
        cursor, out, form = self._cursor, self._out, self._dialect.reasoning
        spaces, closing = "", ""
        if form is not None:
            mark, spaces = yield from cursor.option((form.begin,))
            if mark or self.is_reasoning:
                out.begin_thought()
                out.think("" if mark else spaces)
                yield from self._reasoning(form.end)
                spaces = ""
                if form.answer_begin:
                    closing, spaces = yield from cursor.option((form.answer_begin,))
        out.say("" if closing else spaces)
        yield from self._text_and_calls((form.answer_end,) if form is not None and closing else ())

    def _reasoning(self, end: str) -> Steps[None]:
        # Marks that are tokens of their own are no words of a thought.
        begins_calls = self._form.begin if self._tools and self._form.structure == "sections" else ""
        mark = yield from self._cursor.until(tuple(filter(None, (end, begins_calls))), self._out.think)
        if mark:
            self._out.end_thought()
            self._cursor.push_back("" if mark == end else mark)

    def _text_and_calls(self, closing: tuple[str, ...]) -> Steps[None]:
        """To the end. `closing`: a mark that ends the text once."""
        form = self._form
        openers = tuple(filter(None, (form.begin, form.call_begin))) if self._tools else ()
        if self._tools and not openers:
            mark, spaces = yield from self._cursor.option(form.openings)
            self._out.say(spaces if mark else "")
            yield from self._block(mark, mark or spaces)
        while mark := (yield from self._cursor.until((*openers, *closing), self._out.say)):
            if mark in closing:
                closing, self._out.is_fresh = (), True
            else:
                yield from self._block(mark, mark)

    def _block(self, mark: str, raw: str) -> Steps[None]:
        """Calls behind `mark`; `raw` is what was read of them."""
        if self._form.structure == "json":
            yield from self._objects(mark, raw)
        elif self._form.structure == "python":
            yield from self._python_calls(mark, raw)
        else:
            yield from self._marked_calls(mark)

    def _no_block(self, mark: str, raw: str) -> None:
        """The mark was text; what came behind it is read once more."""
        self._out.say(mark)
        self._cursor.push_back(raw[len(mark) :])

    # --- JSON objects ------------------------------------------------------------------------------------------------

    def _objects(self, mark: str, raw: str) -> Steps[None]:
        is_first, end = True, self._form.end
        while True:
            options = _BRACKETS if is_first or not end else (*_BRACKETS, end)
            option, spaces = yield from self._cursor.option(options)
            raw = raw + spaces if is_first else spaces
            if option == "{":
                if not (yield from self._object([raw, "{"])):
                    return
                is_first = False
            elif option and option == end:
                return
            elif not option:
                if is_first:
                    self._no_block(mark, raw)
                else:
                    self._out.say(spaces)
                return
            else:
                raw += option

    def _object(self, raw: list[str]) -> Steps[bool]:
        """One object, whose bracket was read. False: it was no call and became text, or the answer is over."""
        read = CallObject(frozenset(self._tools))
        character = "{"
        while True:
            was_call = read.is_call
            read.feed(character)
            if read.is_call and not was_call:
                assert read.name is not None
                self._out.begin_call(read.name)
            if read.is_call:
                self._out.add_arguments(read.take_arguments())
            if read.is_call and read.finished:
                self._out.end_call()
                return True
            character = "" if read.is_call is False else (yield from self._cursor.next())
            if not character:
                if not read.is_call:
                    self._out.say("".join(raw))
                return False
            if read.is_call is None:
                raw.append(character)

    # --- sections, and tags with values ------------------------------------------------------------------------------

    def _marked_calls(self, mark: str) -> Steps[None]:
        form, cursor = self._form, self._cursor
        if mark != form.begin:  # a call without its block
            if not (yield from self._marked_call()):
                self._out.say(mark)
                return
            if form.end:
                option, spaces = yield from cursor.option((form.end,))
                self._out.say("" if option else spaces)
            return
        before = mark  # what is text unless a call comes
        while True:
            option, spaces = yield from cursor.option((form.call_begin, form.end))
            if option == form.end and not before:
                return
            if option != form.call_begin or not (yield from self._marked_call()):
                self._out.say(before + spaces + option)
                return
            before = ""

    def _marked_call(self) -> Steps[bool]:
        """What follows the mark of a call. False: it is none, and read once more."""
        form, cursor = self._form, self._cursor
        ends = (form.name_end,) if form.name_end else ("\n", form.key_begin, form.call_end)
        read, end = yield from cursor.word(ends, _MAX_NAME)
        written = read.strip()
        name, own_id = written.partition("[CALL_ID]")[0], None
        if form.own_ids:
            name, own_id = written.removeprefix("functions.").rpartition(":")[0] or written, written
        if not end or name not in self._tools:
            cursor.push_back(read + end if end else "")
            return False
        self._out.begin_call(name, own_id)
        if end in (form.key_begin, form.call_end):
            cursor.push_back(end)
        if form.structure == "tags":
            yield from self._tagged_values(self._tools[name])
        elif form.call_end:
            mark = yield from cursor.until(tuple(filter(None, (form.call_end, form.end))), self._out.add_arguments)
            if mark:
                self._out.end_call()
                cursor.push_back("" if mark == form.call_end else mark)
        else:
            yield from self._one_value()
        return True

    def _one_value(self) -> Steps[None]:
        """Arguments that end with their last bracket."""
        option, spaces = yield from self._cursor.option(("{",))
        if not option:
            self._out.end_call()
            self._out.say(spaces)
            return
        value, character = BalancedJson(), "{"
        while character:
            self._out.add_arguments(character)
            if value.feed(character):
                self._out.end_call()
                return
            character = yield from self._cursor.next()

    def _tagged_values(self, schema: dict[str, Any]) -> Steps[None]:
        form, cursor = self._form, self._cursor
        while True:
            mark = yield from cursor.until(
                tuple(filter(None, (form.key_begin, form.call_end, form.end))), self._out.say
            )
            if not mark:
                return
            if mark != form.key_begin:
                self._out.add_arguments("}" if self._out.has_arguments else "{}")
                self._out.end_call()
                cursor.push_back("" if mark == form.call_end else mark)
                return
            read: list[str] = []
            if not (yield from cursor.until((form.key_end,), read.append)):
                return
            key, _, is_string = "".join(read).partition('" string="')
            key = key.strip().removesuffix(form.key_close or " ").strip()
            types = property_types(schema, key)
            if is_string:
                types = frozenset(("string",)) if is_string == "true" else JSON_TYPES - {"string"}
            self._out.add_arguments(
                (", " if self._out.has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": "
            )
            if not (yield from self._tagged_value(types)):
                return

    def _tagged_value(self, types: frozenset[str]) -> Steps[bool]:
        """One value; False when the answer ends in it. A string is passed on as it comes."""
        form, held = self._form, ""
        if types != {"string"}:
            read: list[str] = []
            mark = yield from self._cursor.until((form.value_end,), read.append)
            text = "".join(read)
            if form.trims_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            self._out.add_arguments(value_json(text, types) if mark else text)
            return bool(mark)
        self._out.add_arguments('"')
        is_first = form.trims_lines

        def say(text: str) -> None:
            nonlocal held, is_first
            text = held + (text.removeprefix("\n") if is_first else text)
            is_first, held = False, "\n" if form.trims_lines and text.endswith("\n") else ""
            self._out.add_arguments(string_json(text.removesuffix("\n") if held else text))

        mark = yield from self._cursor.until((form.value_end,), say)
        self._out.add_arguments('"' if mark else string_json(held))
        return bool(mark)

    # --- calls as Python writes them ---------------------------------------------------------------------------------

    def _python_calls(self, mark: str, raw: str) -> Steps[None]:
        cursor, end = self._cursor, self._form.end
        option, spaces = yield from cursor.option(("[",))
        raw, is_first = raw + spaces + option, True
        if not option and not self._form.begin:
            self._no_block(mark, raw)
            return
        while True:
            name, found = yield from cursor.word(("(",), _MAX_NAME)
            if not found or name.strip() not in self._tools:
                cursor.push_back(name + found if found else "")
                if is_first:
                    self._no_block(mark, raw)
                return
            self._out.begin_call(name.strip())
            if not (yield from self._python_arguments()):
                return
            is_first = False
            option, spaces = yield from cursor.option((",", "]", *filter(None, (end,))))
            if option == "]" and end:
                option, spaces = yield from cursor.option((end,))
            elif option == "," or (not option and self._form.begin):
                continue
            self._out.say("" if option else spaces)
            return

    def _python_arguments(self) -> Steps[bool]:
        """To the bracket that closes them; False when the answer ends before, or they are no arguments by name."""
        cursor = self._cursor
        while True:
            option, _ = yield from cursor.option((")",))
            if option:
                self._out.add_arguments("}" if self._out.has_arguments else "{}")
                self._out.end_call()
                return True
            key, found = yield from cursor.word(("=",), _MAX_NAME)
            if not found or not key.strip().isidentifier():
                cursor.push_back(key + found if found else "")
                return False
            self._out.add_arguments((", " if self._out.has_arguments else "{") + json.dumps(key.strip()) + ": ")
            option, _ = yield from cursor.option(())
            value = LiteralRewriter()
            while character := (yield from cursor.next()):
                if character in ",)" and not value.depth and not value.in_string:
                    self._out.add_arguments(value.flush())
                    if character == ")":
                        cursor.push_back(character)
                    break
                self._out.add_arguments(value.feed(character))
            else:
                self._out.add_arguments(value.flush())
                return False

    # --- messages on channels ----------------------------------------------------------------------------------------

    def _messages(self) -> Steps[None]:
        cursor = self._cursor
        last = self._prompt_end.rpartition(START)[2]
        if MESSAGE in last:  # the prompt holds the head of the first message
            yield from self._message(last.partition(MESSAGE)[0], "")
        elif last in ("", "assistant"):
            option, spaces = yield from cursor.option(("to=",))
            if option:
                yield from self._head(option)
            else:
                self._out.say(spaces)
        while mark := (yield from cursor.until((START, CHANNEL), self._out.say)):
            yield from self._head(mark)

    def _head(self, mark: str) -> Steps[None]:
        read = [mark]
        if not (yield from self._cursor.until((MESSAGE,), read.append)):
            self._out.say("".join(read) if mark == "to=" else "")  # the other marks are tokens: never a user's text
            return
        head = "".join(read)
        yield from self._message(head, head + MESSAGE)

    def _message(self, head: str, raw: str) -> Steps[None]:
        """One message; `raw` is what stands in the text in front of it."""
        cursor, ends = self._cursor, (*MESSAGE_ENDS, START, CHANNEL)
        channel = head.rpartition(CHANNEL)[2].strip()
        found = _RECIPIENT.search(head.replace(CHANNEL, " ").replace(CONSTRAIN, " "))
        recipient = found.group(1).removeprefix("functions.") if found is not None else None
        if recipient is not None and recipient in self._tools:
            self._out.begin_call(recipient)
            mark = yield from cursor.until(ends, self._out.add_arguments)
            if mark:
                self._out.end_call()
        elif channel.startswith("analysis") and recipient is None:
            self._out.begin_thought()
            mark = yield from cursor.until(ends, self._out.think)
            if mark:
                self._out.end_thought()
        else:
            is_text = recipient is None
            self._out.say("\n" * self._out.has_text if is_text else raw)
            mark = yield from cursor.until(ends, self._out.say)
            self._out.say(mark if not is_text and mark in MESSAGE_ENDS else "")
            self._out.is_fresh = True
        if mark in (START, CHANNEL):
            cursor.push_back(mark)
