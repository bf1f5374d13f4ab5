"""How model families mark their reasoning and their calls of tools, as tables, and which of them a chat template
teaches.

Families differ in marks, hardly in structure. Five structures cover them: JSON objects with a name and arguments,
sections of a name and JSON, tags with a value for each parameter, calls as Python writes them, and the channels of
gpt-oss. A row says the marks; `AnswerReader` reads by them and `grammar_text` writes by them.

Rejected: a class for each family. They repeat each other, and a fault mended in one stays in the others.
"""

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

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


@dataclass(frozen=True, kw_only=True)
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


def _dsml(name: str, block: str) -> CallFormat:
    """DeepSeek's tags, in a block of this name."""
    return CallFormat(
        name=name,
        structure="tags",
        begin=f"<｜DSML｜{block}>",
        end=f"</｜DSML｜{block}>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">',
        call_end="</｜DSML｜invoke>",
        key_begin='<｜DSML｜parameter name="',
        key_end='">',
        says_strings=True,
        value_end="</｜DSML｜parameter>",
        line_breaks=True,
        signs=("DSML｜", block),
    )


def _functions(name: str, block: str, *, signs: tuple[str, ...], trims_lines: bool = False) -> CallFormat:
    """`<function=f>` with `<parameter=k>`, each in a block of this name."""
    return CallFormat(
        name=name,
        structure="tags",
        begin=f"<{block}>",
        end=f"</{block}>",
        call_begin="<function=",
        name_end=">",
        call_end="</function>",
        one_a_block=True,
        key_begin="<parameter=",
        key_end=">",
        value_end="</parameter>",
        line_breaks=True,
        trims_lines=trims_lines,
        signs=signs,
    )


def _listed(
    name: str,
    begin: str,
    end: str = "",
    *,
    structure: Structure = "json",
    line_breaks: bool = False,
    id_letters: int = 0,
) -> CallFormat:
    """A list of calls between two marks, of which the first is the sign."""
    return CallFormat(
        name=name,
        structure=structure,
        begin=begin,
        end=end,
        separator=", ",
        is_list=True,
        line_breaks=line_breaks,
        id_letters=id_letters,
        signs=(begin,),
    )


# More special ones before those whose signs they share.
CALL_FORMATS = (
    CallFormat(
        name="harmony",
        structure="channels",
        openings=(CHANNEL, MESSAGE, START, CONSTRAIN, *MESSAGE_ENDS),
        signs=(CHANNEL, MESSAGE),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    CallFormat(
        name="deepseek_v3",
        structure="sections",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        signs=("<｜tool▁call▁begin｜>", "```json"),
    ),
    CallFormat(
        name="deepseek_v31",
        structure="sections",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        signs=("<｜tool▁call▁begin｜>",),
    ),
    CallFormat(
        name="kimi_k2",
        structure="sections",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        own_ids=True,
        signs=("<|tool_call_begin|>",),
    ),
    CallFormat(
        name="minimax_m2",
        structure="tags",
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        key_begin='<parameter name="',
        key_end='">',
        value_end="</parameter>",
        line_breaks=True,
        signs=("minimax:tool_call",),
    ),
    _functions("seed_oss", "seed:tool_call", signs=("seed:tool_call",)),
    CallFormat(
        name="glm45",
        structure="tags",
        call_begin="<tool_call>",
        call_end="</tool_call>",
        key_begin="<arg_key>",
        key_close="</arg_key>",
        key_end="<arg_value>",
        value_end="</arg_value>",
        line_breaks=True,
        signs=("<arg_key>",),
    ),
    _functions("qwen3_coder", "tool_call", trims_lines=True, signs=("<function=", "<parameter=")),
    CallFormat(
        name="mistral",
        structure="sections",
        call_begin="[TOOL_CALLS]",
        name_end="[ARGS]",
        id_letters=9,
        signs=("[TOOL_CALLS]", "[ARGS]"),
    ),
    _listed("mistral_json", "[TOOL_CALLS]", id_letters=9),
    CallFormat(
        name="hermes",
        structure="json",
        begin="<tool_call>",
        end="</tool_call>",
        one_a_block=True,
        line_breaks=True,
        signs=("<tool_call>",),
    ),
    _listed("granite", "<|tool_call|>"),
    _listed("hunyuan", "<tool_calls>", "</tool_calls>", line_breaks=True),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", structure="python"),
    CallFormat(
        name="olmo3",
        structure="python",
        begin="<function_calls>",
        end="</function_calls>",
        separator="\n",
        signs=("<function_calls>",),
    ),
    CallFormat(
        name="pythonic",
        structure="python",
        openings=("<|python_start|>",),
        end="<|python_end|>",
        separator=", ",
        is_list=True,
        signs=("(params_name1=params_value1",),
    ),
    CallFormat(
        name="llama3_json",
        structure="json",
        openings=("<|python_tag|>",),
        separator="; ",
        arguments_key="parameters",
        signs=('"parameters": ',),
    ),
)

REASONING_FORMATS = (
    ReasoningFormat(name="harmony", begin="", end="", signs=(CHANNEL, MESSAGE)),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", signs=("[/THINK]",)),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>", signs=("</seed:think>",)),
    ReasoningFormat(
        name="granite32",
        begin="Here is my thought process:",
        end="Here is my response:",
        signs=("Here is my thought process:",),
    ),
    ReasoningFormat(
        name="ernie45",
        begin="<think>",
        end="</think>",
        answer_begin="<response>",
        answer_end="</response>",
        signs=("</think>", "</response>"),
    ),
    ReasoningFormat(
        name="hunyuan",
        begin="<think>",
        end="</think>",
        answer_begin="<answer>",
        answer_end="</answer>",
        signs=("</think>", "</answer>"),
    ),
    ReasoningFormat(name="think", begin="<think>", end="</think>", signs=("</think>",)),
    ReasoningFormat(name="think_open", begin="<think>", end="</think>", starts_open=True),
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

    @property
    def has_channels(self) -> bool:
        """Reasoning, calls and text are messages of their own."""
        return any(form is not None and form.name == "harmony" for form in (self.reasoning, self.calls))

    @property
    def marks(self) -> frozenset[str]:
        """All texts that must reach a reader."""
        channels = CALL_FORMATS[0].marks if self.has_channels else frozenset[str]()
        return channels.union(*(form.marks for form in (self.reasoning, self.calls) if form is not None))


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
