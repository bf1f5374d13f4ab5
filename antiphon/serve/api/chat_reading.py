"""How the answers to one chat are read, and the grammar that they follow: tools, their choice, what reasoning may take,
and the formats of answers that several servers have names for.
"""

import asyncio
import json
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from antiphon.base.errors import UserError
from antiphon.serve.api.chat_messages import AllowedToolsChoice, FunctionDefinition, NamedToolChoice
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import bad_request, from_user_error, too_busy
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from antiphon.serve.engine_api import QueueFull, ShuttingDown
from antiphon.serve.text.answer_reader import AnswerReader, leaves_reasoning_open
from antiphon.serve.text.dialects import MESSAGE_ENDS, Dialect
from antiphon.serve.text.grammar_text import (
    ANSWER,
    Spelling,
    Wish,
    answer_rules,
    choice_grammar,
    composed_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    written_grammar,
)

_GRAMMAR_PATIENCE_S = 60.0
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
_ANY_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_Grammar = Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class ChatReading:
    """`functions`: that may be called, by name. `prompt`: what the answer follows, known once it is rendered.
    `max_reasoning`: tokens that the reasoning may take, None for any number."""

    dialect: Dialect
    functions: dict[str, FunctionDefinition] = field(default_factory=dict)
    forced: bool = False
    at_most_one: bool = False
    max_reasoning: int | None = None
    shows_reasoning: bool = True
    prompt: str = ""

    @property
    def offers_tools(self) -> bool:
        return bool(self.functions)

    def reader(self) -> AnswerReader:
        """A reader for one answer."""
        schemas = {name: function.parameters or {} for name, function in self.functions.items()}
        return AnswerReader(self.dialect, schemas, prompt=self.prompt, at_most_one=self.at_most_one, forced=self.forced)

    @property
    def needs_rules(self) -> bool:
        """Whether an answer of any text has to follow a grammar."""
        is_strict = any(function.strict for function in self.functions.values())
        return self.forced or is_strict or self.max_reasoning is not None

    def grammar(self, spelling: Spelling, answer: _Grammar | None) -> str:
        """What answers follow; `answer`: one without calls. `UserError` for what cannot be promised."""
        schemas: dict[str, dict[str, Any]] = {}
        for name, function in self.functions.items():
            own = _NO_PARAMETERS if function.parameters is None else function.parameters
            schemas[name] = own if self.forced or function.strict else {}
        wish = Wish(
            schemas=schemas,
            forced=self.forced,
            at_most_one=self.at_most_one,
            has_answer=answer is not None,
            starts_reasoning=leaves_reasoning_open(self.dialect, self.prompt),
            max_reasoning=self.max_reasoning,
        )
        rules = lark_grammar(lambda: answer_rules(self.dialect, spelling, wish))
        return rules if answer is None or self.forced else composed_grammar(rules, answer(), ANSWER)


def chat_reading(context: ApiContext, request: ChatCompletionRequest) -> ChatReading:
    """`ApiError` 400 when the request contradicts itself or the model cannot do it."""
    dialect = context.dialect
    if request.separate_reasoning is False:
        if dialect.has_channels:
            raise bad_request(
                "separate_reasoning is false: this model's answers are messages on channels; leave it out",
                param="separate_reasoning",
            )
        dialect = replace(dialect, reasoning=None)
    budget = request.thinking_token_budget
    if budget is not None and context.dialect.reasoning is None:
        raise bad_request(
            "thinking_token_budget: this model's chat template marks no reasoning (--reasoning-parser names it)",
            param="thinking_token_budget",
        )
    shows = request.include_reasoning is not False
    reading = ChatReading(dialect=dialect, max_reasoning=budget, shows_reasoning=shows)
    functions = {tool.function.name: tool.function for tool in request.tools or ()}
    choice = request.tool_choice
    _check_names(request, functions)
    if not functions or choice == "none":
        return reading
    if dialect.calls is None and "tools" in context.tokenizer.chat_template:
        raise bad_request(
            "tools: how this model writes calls does not show in its chat template; start the server with --tool-parser"
            ' NAME, leave tools out or send tool_choice "none"',
            param="tools",
        )
    at_most_one = request.parallel_tool_calls is False
    if isinstance(choice, NamedToolChoice):
        functions, at_most_one = {choice.function.name: functions[choice.function.name]}, True
    forced = choice == "required" or isinstance(choice, NamedToolChoice)
    if isinstance(choice, AllowedToolsChoice):
        functions = {tool.function.name: functions[tool.function.name] for tool in choice.allowed_tools.tools}
        forced = choice.allowed_tools.mode == "required"
    return replace(reading, functions=functions, forced=forced, at_most_one=at_most_one)


def _check_names(request: ChatCompletionRequest, functions: dict[str, FunctionDefinition]) -> None:
    choice = request.tool_choice
    if len(functions) < len(request.tools or ()):
        raise bad_request("tools has two functions of the same name: give each its own", param="tools")
    wants_call = isinstance(choice, NamedToolChoice | AllowedToolsChoice) or choice == "required"
    if wants_call and not functions:
        raise bad_request("tool_choice wants a call: send tools to choose from", param="tool_choice")
    named = [choice] if isinstance(choice, NamedToolChoice) else []
    if isinstance(choice, AllowedToolsChoice):
        named = choice.allowed_tools.tools
    for tool in named:
        if tool.function.name not in functions:
            raise bad_request(f"tool_choice names {tool.function.name!r}: it is not among tools", param="tool_choice")


# --- formats of answers -----------------------------------------------------------------------------------------------


def _answer_format(request: GenerationRequest) -> tuple[_Grammar | None, str]:
    """What makes the grammar of the answer, None for any text, and the parameter that asks for it."""
    asked: list[tuple[str, Callable[[Any], str], Any]] = []
    formatted, described = request.response_format, request.structured_outputs
    if isinstance(formatted, JsonObjectFormat):
        asked.append(("response_format", json_grammar, _ANY_JSON_OBJECT))
    elif isinstance(formatted, JsonSchemaFormat):
        asked.append(("response_format", json_grammar, formatted.json_schema.schema_))
    if described is not None:
        asked += [
            ("structured_outputs.json", json_grammar, described.json_),
            ("structured_outputs.regex", regex_grammar, described.regex),
            ("structured_outputs.choice", choice_grammar, described.choice),
            ("structured_outputs.grammar", written_grammar, described.grammar),
            ("structured_outputs.json_object", json_grammar, _ANY_JSON_OBJECT if described.json_object else None),
        ]
        if all(value is None for _, _, value in asked):
            raise bad_request(
                "structured_outputs is empty: send json, regex, choice or grammar", param="structured_outputs"
            )
    asked += [
        ("guided_json", json_grammar, request.guided_json),
        ("guided_regex", regex_grammar, request.guided_regex),
        ("guided_choice", choice_grammar, request.guided_choice),
        ("guided_grammar", written_grammar, request.guided_grammar),
        ("regex", regex_grammar, request.regex),
        ("ebnf", written_grammar, request.ebnf),
        ("json_schema", json_grammar, request.json_schema),
    ]
    wanted = [
        (param, make, _schema_of(value, param) if make is json_grammar else value)
        for param, make, value in asked
        if value is not None
    ]
    if len(wanted) > 1:
        first, second = wanted[0][0], wanted[1][0]
        raise bad_request(f"{first} and {second} both say what the answer is: send one of them", param=second)
    if not wanted:
        return None, ""
    ((param, make, value),) = wanted
    return partial(make, value), param


def _schema_of(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{param} is not a JSON schema as text: send an object", param=param)
    return value


def can_end_reasoning(context: ApiContext) -> bool:
    """Whether this model's reasoning can be ended after a number of tokens: its closing mark must be a token."""
    reasoning = context.dialect.reasoning
    if reasoning is None or context.grammars is None:
        return False
    return _spelling(context).is_token(MESSAGE_ENDS[0] if context.dialect.has_channels else reasoning.end)


def _spelling(context: ApiContext) -> Spelling:
    return Spelling(context.tokenizer.token_bytes.added_ids, context.engine.info.eos_token_ids)


async def compile_grammar(
    context: ApiContext, request: GenerationRequest, client: Hashable, reading: ChatReading | None = None
) -> str | None:
    """The grammar that the request asks for, None for free text; `ApiError` 400 when a schema cannot be followed, 429
    when other schemas take too long; `client` takes turns with others."""
    answer, param = _answer_format(request)
    by_rules = reading is not None and (
        reading.needs_rules or (answer is not None and (reading.offers_tools or reading.dialect.reasoning is not None))
    )
    if answer is None and not by_rules:
        return None
    param = param or ("tools" if reading is not None and reading.offers_tools else "thinking_token_budget")
    if context.grammars is None:
        raise bad_request("this model cannot follow a grammar (the server's log says why)", param=param)
    if by_rules:
        assert reading is not None
        making = partial(reading.grammar, _spelling(context), answer)
        return await _compiled(context.grammars.compile(making, client), param)
    assert answer is not None
    if isinstance(request.response_format, JsonObjectFormat):
        return context.grammars.json_object()
    what = "the JSON schema" if isinstance(answer, partial) and answer.func is json_grammar else "the grammar"
    return await _compiled(context.grammars.compile(answer, client, what), param)


async def _compiled(compiling: Future[str], param: str) -> str:
    try:
        async with asyncio.timeout(_GRAMMAR_PATIENCE_S):
            return await asyncio.wrap_future(compiling)
    except TimeoutError as error:
        raise too_busy("too many JSON schemas wait to be compiled: try again later", _GRAMMAR_PATIENCE_S) from error
    except (QueueFull, ShuttingDown) as error:
        raise from_user_error(error) from error
    except UserError as error:
        raise bad_request(str(error), param=param, code="grammar_error") from error
