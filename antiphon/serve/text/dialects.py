"""How model families mark their reasoning and their calls of tools, as tables, and which of them a chat template
teaches.

Families differ in marks, hardly in structure. Five structures cover them: JSON objects with a name and arguments,
sections of a name and JSON, tags with a value for each parameter, calls as Python writes them, and the channels of
gpt-oss. A row says the marks; `AnswerReader` reads by them and `grammar_text` writes by them.

Rejected: a class for each family. They repeat each other, and a fault repaired in one stays in the others.
"""

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from antiphon.base.errors import UserError

Structure = Literal["json", "sections", "tags", "python", "channels"]


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How calls are marked. `begin` and `end` enclose all calls of a block, `call_begin`, `name_end` and `call_end`
    parts of one call; "" for what a family does not write. Without `begin` and `call_begin` an answer that begins with
    a call consists of calls, perhaps behind one of `openings`. `key_close`: what the model writes before `key_end`.

    `signs`: texts that a template of this format holds, all of them. `separator`: what the model writes between calls
    of a block; `is_list`: they are a JSON array; `one_a_block`: each has a block of its own. `line_breaks`: there may
    be some between the parts; `trims_lines`: a value stands on lines of its own. `says_strings`: a parameter says
    whether its value is a string. `own_ids`: the model writes ids of calls, which its template wants back."""

    name: str
    structure: Structure
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    key_begin: str = ""
    key_close: str = ""
    key_end: str = ""
    value_end: str = ""
    arguments_key: str = "arguments"
    openings: tuple[str, ...] = ()
    separator: str = ""
    is_list: bool = False
    one_a_block: bool = False
    line_breaks: bool = False
    trims_lines: bool = False
    says_strings: bool = False
    own_ids: bool = False
    id_letters: int = 0
    signs: tuple[str, ...] = ()

    @property
    def marks(self) -> frozenset[str]:
        """All texts that must reach a reader, even where they are special tokens."""
        own = (self.begin, self.end, self.call_begin, self.name_end, self.call_end)
        return frozenset((*own, self.key_begin, self.key_end, self.value_end, *self.openings)) - {""}

    def new_call_id(self) -> str:
        """A fresh id; templates of some families refuse what is not a number of letters and digits."""
        if self.id_letters:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_letters))
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is marked. It comes first in an answer, opened by `begin` there or at the end of the prompt.
    `starts_open`: even where neither has `begin`. What follows may stand between `answer_begin` and `answer_end`."""

    name: str
    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""
    starts_open: bool = False
    signs: tuple[str, ...] = ()

    @property
    def marks(self) -> frozenset[str]:
        """As for `CallFormat`."""
        return frozenset((self.begin, self.end, self.answer_begin, self.answer_end)) - {""}


CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


# The marks of each structure in the order in which they are written.
_MARKS: dict[Structure, tuple[str, ...]] = {
    "tags": ("begin", "call_begin", "name_end", "key_begin", "key_end", "value_end", "call_end", "end"),
    "sections": ("begin", "call_begin", "name_end", "call_end", "end"),
    "json": ("begin", "end"),
    "python": ("begin", "end"),
}
_BETWEEN = re.compile(" (?:NAME|KEY|VALUE|JSON|CALLS) |  ")


def _format(name: str, structure: Structure, written: str, signs: tuple[str, ...], **options: Any) -> CallFormat:
    """Calls that are `written` like this: marks around a NAME, KEY, VALUE, JSON or CALLS, two spaces where nothing
    stands between two marks, and - for a mark that is not written."""
    marks = ("" if mark == "-" else mark for mark in _BETWEEN.split(written))
    fields: dict[str, Any] = {"line_breaks": structure == "tags", **dict(zip(_MARKS[structure], marks, strict=True))}
    return CallFormat(name=name, structure=structure, signs=signs, **(fields | options))


def _listed(name: str, structure: Structure, written: str, **options: Any) -> CallFormat:
    """A list of calls between two marks, of which the first is the sign."""
    sign = (written.partition(" ")[0],)
    return _format(name, structure, written, sign, separator=", ", is_list=True, **options)


_DSML = (
    '<｜DSML｜{0}>  <｜DSML｜invoke name=" NAME ">  <｜DSML｜parameter name=" KEY "> VALUE </｜DSML｜parameter>'
    "  </｜DSML｜invoke>  </｜DSML｜{0}>"
)
_FUNCTION = "<{0}>  <function= NAME >  <parameter= KEY > VALUE </parameter>  </function>  </{0}>"
_DEEPSEEK = "<｜tool▁calls▁begin｜>  {0} NAME {1} JSON {2}  <｜tool▁calls▁end｜>"

# More special ones before those whose signs they share.
CALL_FORMATS = (
    CallFormat(
        name="harmony",
        structure="channels",
        openings=(CHANNEL, MESSAGE, START, CONSTRAIN, *MESSAGE_ENDS),
        signs=(CHANNEL, MESSAGE),
    ),
    _format("deepseek_v32", "tags", _DSML.format("function_calls"), ("DSML｜", "function_calls"), says_strings=True),
    _format("deepseek_v4", "tags", _DSML.format("tool_calls"), ("DSML｜", "tool_calls"), says_strings=True),
    _format(
        "deepseek_v3",
        "sections",
        _DEEPSEEK.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>", "```json"),
        separator="\n",
    ),
    _format(
        "deepseek_v31",
        "sections",
        _DEEPSEEK.format("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>",),
    ),
    _format(
        "kimi_k2",
        "sections",
        "<|tool_calls_section_begin|>  <|tool_call_begin|> NAME <|tool_call_argument_begin|> JSON <|tool_call_end|>"
        "  <|tool_calls_section_end|>",
        ("<|tool_call_begin|>",),
        own_ids=True,
    ),
    _format(
        "minimax_m2",
        "tags",
        '<minimax:tool_call>  <invoke name=" NAME ">  <parameter name=" KEY "> VALUE </parameter>  </invoke>'
        "  </minimax:tool_call>",
        ("minimax:tool_call",),
    ),
    _format("seed_oss", "tags", _FUNCTION.format("seed:tool_call"), ("seed:tool_call",), one_a_block=True),
    _format(
        "glm45",
        "tags",
        "-  <tool_call> NAME -  <arg_key> KEY <arg_value> VALUE </arg_value>  </tool_call>  -",
        ("<arg_key>",),
        key_close="</arg_key>",
    ),
    _format(
        "qwen3_coder",
        "tags",
        _FUNCTION.format("tool_call"),
        ("<function=", "<parameter="),
        one_a_block=True,
        trims_lines=True,
    ),
    _format("mistral", "sections", "-  [TOOL_CALLS] NAME [ARGS] JSON -  -", ("[TOOL_CALLS]", "[ARGS]"), id_letters=9),
    _listed("mistral_json", "json", "[TOOL_CALLS] CALLS -", id_letters=9),
    _format("hermes", "json", "<tool_call> CALLS </tool_call>", ("<tool_call>",), one_a_block=True, line_breaks=True),
    _listed("granite", "json", "<|tool_call|> CALLS -"),
    _listed("hunyuan", "json", "<tool_calls> CALLS </tool_calls>", line_breaks=True),
    _listed("nemotron", "json", "<TOOLCALL> CALLS </TOOLCALL>"),
    _listed("lfm2", "python", "<|tool_call_start|> CALLS <|tool_call_end|>"),
    _format("olmo3", "python", "<function_calls> CALLS </function_calls>", ("<function_calls>",), separator="\n"),
    _format(
        "pythonic",
        "python",
        "- CALLS <|python_end|>",
        ("(params_name1=params_value1",),
        openings=("<|python_start|>",),
        separator=", ",
        is_list=True,
    ),
    _format(
        "llama3_json",
        "json",
        "- CALLS -",
        ('"parameters": ',),
        openings=("<|python_tag|>",),
        separator="; ",
        arguments_key="parameters",
    ),
)

_THINK = ("<think>", "</think>")
_GRANITE = ("Here is my thought process:", "Here is my response:")
REASONING_FORMATS = (
    ReasoningFormat("harmony", "", "", signs=(CHANNEL, MESSAGE)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", signs=("[/THINK]",)),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", signs=("</seed:think>",)),
    ReasoningFormat("granite32", *_GRANITE, signs=_GRANITE[:1]),
    ReasoningFormat("ernie45", *_THINK, "<response>", "</response>", signs=("</think>", "</response>")),
    ReasoningFormat("hunyuan", *_THINK, "<answer>", "</answer>", signs=("</think>", "</answer>")),
    ReasoningFormat("think", *_THINK, signs=("</think>",)),
    ReasoningFormat("think_open", *_THINK, starts_open=True),
)

# Names that users of other servers know.
_CALL_ALIASES = {
    "ernie45": "hermes",
    "glm47": "glm45",
    "gpt-oss": "harmony",
    "hunyuan_a13b": "hunyuan",
    "jamba": "hunyuan",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "minimax-m2": "minimax_m2",
    "openai": "harmony",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
}
_REASONING_ALIASES = {
    "deepseek_r1": "think_open",
    "deepseek_v3": "think",
    "glm45": "think",
    "gpt-oss": "harmony",
    "granite": "granite32",
    "hunyuan_a13b": "hunyuan",
    "kimi_k2": "think",
    "minimax_m2": "think_open",
    "openai_gptoss": "harmony",
    "qwen3": "think",
}
NO_PARSER = "none"

Form = TypeVar("Form", CallFormat, ReasoningFormat)


@dataclass(frozen=True)
class Dialect:
    """What one model writes; None for what it does not, or what is not known of it."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @cached_property
    def has_channels(self) -> bool:
        """Reasoning, calls and text are messages of their own."""
        return any(form is not None and form.name == "harmony" for form in (self.reasoning, self.calls))

    @cached_property
    def marks(self) -> frozenset[str]:
        """All texts that must reach a reader."""
        channels = CALL_FORMATS[0].marks if self.has_channels else frozenset[str]()
        return channels.union(*(form.marks for form in (self.reasoning, self.calls) if form is not None))

    @cached_property
    def without_calls(self) -> "Dialect":
        """What it writes when no calls are read."""
        return self if self.has_channels else Dialect(self.reasoning)


def dialect_of(chat_template: str, *, reasoning_parser: str | None = None, tool_parser: str | None = None) -> Dialect:
    """What a template teaches its model, or what the operator says of it by name; `UserError` for an unknown name."""
    if reasoning_parser is None:
        reasoning = _first(REASONING_FORMATS, chat_template)
    else:
        reasoning = _named("--reasoning-parser", reasoning_parser, REASONING_FORMATS, _REASONING_ALIASES)
    if tool_parser is None:
        return Dialect(reasoning, _first(CALL_FORMATS, chat_template))
    return Dialect(reasoning, _named("--tool-parser", tool_parser, CALL_FORMATS, _CALL_ALIASES))


def _first(forms: Iterable[Form], chat_template: str) -> Form | None:
    found = (form for form in forms if form.signs and all(sign in chat_template for sign in form.signs))
    return next(found, None)


def _named(option: str, name: str, forms: tuple[Form, ...], aliases: dict[str, str]) -> Form | None:
    if name == NO_PARSER:
        return None
    wanted = aliases.get(name, name)
    for form in forms:
        if form.name == wanted:
            return form
    known = ", ".join(sorted({NO_PARSER, *aliases, *(form.name for form in forms)}))
    raise UserError(f"{option} is {name!r}: the formats it knows are {known}")
