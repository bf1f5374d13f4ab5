"""What a request's parameters mean: `SamplingParams`; defaults, limits of model and operator; how large the answer may
become; how the answers to a chat are read, and the grammar that they follow: tools, their choice, what reasoning may
take, and the formats of answers that several servers have names for.

Defaults are OpenAI's; a chat answer without a limit may fill the rest of the context, as far as an answer may be so
large. n answers with a seed use seed, seed + 1, ...: each is reproducible alone.

A request of some hundred bytes can ask for gigabytes: answers times tokens times alternatives. So an answer's size is
estimated before anything is computed for it, with typical lengths: eight bytes of text a token, and for the
log-probabilities the vocabulary's average token. The longest token would be safe and would refuse most of what people
ask for. So an answer that grows to twice the limit is given up (`respond`). Streams without a prompt's
log-probabilities have no such limit: they are gone when they are sent.
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
from antiphon.serve.api.choice import TokenizedPrompt
from antiphon.serve.api.context import ApiContext
from antiphon.serve.api.errors import ApiError, bad_request, from_user_error, too_busy
from antiphon.serve.api.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
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
from antiphon.specs.sampling import SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_N = 16
_MAX_ANSWERS = 256  # of one request
_MAX_LOGIT_BIAS = 1024
_TEXT_BYTES = 8
_ID_BYTES = 7
_COMPLETION_BYTES = 24  # of an alternative, beside its token: quotes and number
_COMPLETION_ENTRY_BYTES = 40  # of a token beside its alternatives
_CHAT_BYTES = 64
_PROMPT_ENTRY_BYTES = 72
_DIGITS_OF_A_BYTE = 4  # in a chat's list of bytes
# What a request and the engine call alike, with the same default.
_SAME = (
    "min_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "priority",
)  # fmt: skip
BadWords = tuple[tuple[int, ...], ...]
_GRAMMAR_PATIENCE_S = 60.0
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
_ANY_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_Grammar = Callable[[], str]


def check_request(context: ApiContext, request: GenerationRequest, num_prompts: int) -> None:
    """Everything that can be refused before anything is tokenized or compiled further."""
    num_answers = request.n or 1
    if num_answers > _MAX_N:
        raise bad_request(f"n is {num_answers}: at most {_MAX_N}", param="n")
    if request.best_of is not None and request.best_of != num_answers:
        raise bad_request(
            f"best_of is {request.best_of}: it must be n ({num_answers}), because no answer is thrown away; raise n and"
            " choose among the answers yourself",
            param="best_of",
        )
    if num_answers * num_prompts > _MAX_ANSWERS:
        raise bad_request(
            f"n is {num_answers} for {num_prompts} prompts: at most {_MAX_ANSWERS} answers a"
            " request; send several requests",
            param="n",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true", param="stream_options")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        context.limits.check_token_ids(getattr(request, name) or [], name)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not sent in streams: leave out stream or prompt_logprobs", param="stream")
    bias = request.logit_bias or {}
    if len(bias) > _MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(bias)} entries: at most {_MAX_LOGIT_BIAS}", param="logit_bias")
    context.limits.check_token_ids(list(bias), "logit_bias")


def sampling_params(
    context: ApiContext,
    request: CompletionRequest | ChatCompletionRequest,
    num_prompt_tokens: int,
    grammar: str | None,
    bad_words: BadWords,
) -> SamplingParams:
    """The engine's parameters for the answers to one prompt; `ApiError` 400 for what does not fit the context or
    contradicts itself."""
    limit = context.engine.info.max_model_len
    room = max(1, limit - num_prompt_tokens)  # at least one, so that a full context is an error
    if isinstance(request, ChatCompletionRequest):
        max_tokens, logprobs, prompt_logprobs = _of_chat(context, request, room)
    else:
        max_tokens, logprobs, prompt_logprobs = _of_completion(request, room)
    reported_ids = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    if reported_ids and logprobs is None:
        raise bad_request("logprob_token_ids needs logprobs", param="logprob_token_ids")
    if request.max_tokens_may_not_fit:
        max_tokens = min(max_tokens, room)
    if num_prompt_tokens + max_tokens > limit:
        raise context.limits.too_long(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}:"
            " shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens is {min_tokens}: at most max_tokens ({max_tokens})", param="min_tokens")
    stated: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **stated,
        max_tokens=max_tokens,
        top_k=max(0, request.top_k or 0),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=len(reported_ids) if reported_ids else logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
        logprob_token_ids=reported_ids,
        grammar=grammar,
    )


def _of_completion(request: CompletionRequest, room: int) -> tuple[int, int | None, int | None]:
    """The most tokens of an answer, and the alternatives to report for its tokens and for those of the prompt."""
    of_prompt = request.logprobs if request.echo else None
    if request.prompt_logprobs is not None:
        if of_prompt not in (None, request.prompt_logprobs):
            raise bad_request(
                f"prompt_logprobs is {request.prompt_logprobs}, and echo reports logprobs ({of_prompt}) of the prompt:"
                " send the same number, or one of the two",
                param="prompt_logprobs",
            )
        of_prompt = request.prompt_logprobs
    max_tokens = min(_DEFAULT_COMPLETION_TOKENS, room) if request.max_tokens is None else request.max_tokens
    return max_tokens, request.logprobs, of_prompt


def _of_chat(context: ApiContext, request: ChatCompletionRequest, room: int) -> tuple[int, int | None, int | None]:
    """As `_of_completion`."""
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        raise bad_request("max_tokens and max_completion_tokens mean the same: send one of them", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.max_tokens == 0:
        raise bad_request("max_tokens is 0: a chat answer has at least 1 token", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is None:
        max_tokens = min(room, _num_affordable_tokens(context, request, logprobs))
    return max_tokens, logprobs, request.prompt_logprobs


def with_seed(params: SamplingParams, seed: int | None, answer: int) -> SamplingParams:
    """The parameters of answer number `answer`; seeds reach the engine as 0 to 2**63 - 1, whatever sign was sent."""
    return params if seed is None else replace(params, seed=(seed + answer) % 2**63)


# --- how large an answer may become -----------------------------------------------------------------------------------


def _num_affordable_tokens(context: ApiContext, request: ChatCompletionRequest, logprobs: int | None) -> int:
    """How many tokens each answer of a request without max_tokens may have; at least one."""
    if request.stream:
        return context.engine.info.max_model_len
    per_token = _bytes_per_token(context, request, logprobs) * (request.n or 1)
    return max(1, int(context.settings.max_answer_bytes / per_token))


def check_answer_size(
    context: ApiContext, request: GenerationRequest, prompts: list[TokenizedPrompt], params: list[SamplingParams]
) -> None:
    """`ApiError` 400 when the answer is going to be too large to be made."""
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    if request.stream and params[0].prompt_logprobs is None:
        return
    per_token = _bytes_per_token(context, request, params[0].logprobs)
    per_prompt_token = per_token if echo else _ID_BYTES if request.return_token_ids else 0
    if request.prompt_logprobs is not None:
        length = 1.5 * context.tokenizer.mean_token_characters
        per_prompt_token += (1 + request.prompt_logprobs) * (_PROMPT_ENTRY_BYTES + length)
    num_answers = request.n or 1
    total = num_answers * sum(
        per_prompt_token * len(prompt.token_ids) + per_token * each.max_tokens
        for prompt, each in zip(prompts, params, strict=True)
    )
    if total > context.settings.max_answer_bytes:
        what = f"{num_answers * len(prompts)} choices of up to {max(each.max_tokens for each in params)} tokens"
        what += " after their prompts" if echo else ""
        if params[0].logprobs is not None:
            what += f", {params[0].logprobs} alternatives for each token"
        raise answer_too_large(context, f"would have about {total:.0f} bytes ({what})")


def answer_too_large(context: ApiContext, how: str) -> ApiError:
    return bad_request(
        f"the answer {how}: at most {context.settings.max_answer_bytes} are made for one request; lower max_tokens,"
        " n or the number of logprobs, or send several requests with fewer prompts",
        param="max_tokens",
        code="answer_too_large",
    )


def _bytes_per_token(context: ApiContext, request: GenerationRequest, logprobs: int | None) -> float:
    num_bytes: float = _TEXT_BYTES + (_ID_BYTES if request.return_token_ids else 0)
    if logprobs is None:
        return num_bytes
    length = 1.5 * context.tokenizer.mean_token_characters  # escapes, and letters of two bytes
    if isinstance(request, ChatCompletionRequest):
        return num_bytes + (1 + logprobs) * (_CHAT_BYTES + (1 + _DIGITS_OF_A_BYTE) * length)
    return num_bytes + _COMPLETION_ENTRY_BYTES + length + (1 + logprobs) * (_COMPLETION_BYTES + length)


# --- how a chat's answers are read ------------------------------------------------------------------------------------


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
    if isinstance(formatted, JsonSchemaFormat):
        asked.append(("response_format", json_grammar, formatted.json_schema.schema_))
    elif formatted is not None and formatted.type == "json_object":
        asked.append(("response_format", json_grammar, _ANY_JSON_OBJECT))
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
    if not wanted:
        return None, ""
    param, make, value = wanted[0]
    for other, *wish in wanted[1:]:
        if wish != [make, value]:  # clients of several servers say the same by several names
            raise bad_request(f"{param} and {other} both say what the answer is: send one of them", param=other)
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
    if request.response_format is not None and request.response_format.type == "json_object":
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
